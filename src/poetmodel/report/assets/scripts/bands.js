// Contents of RAM over time, from the values of poetmodel.report.timeline: RAM levels, and a stack of
// bands for copies and workspaces, as `stack_bands` of poetmodel.report.still does for still images.
const makeBands = (line, graph, counted) => {
  const n = line.ops.length;
  // -- levels: RAM during an instruction (2 p) and after it (2 p + 1); only some take time -------
  const timed = line.issued !== null && !counted;
  const starts = new Float64Array(2 * n + 1);
  for (let p = 0; p < n; p += 1) starts[2 * p] = starts[2 * p + 1] = timed ? line.issued[p] : p;
  if (timed) for (const [p, , end] of line.work) if ("ca".includes(line.ops[p])) starts[2 * p + 1] = end;
  if (!timed) for (let p = 0; p < n; p += 1) starts[2 * p + 1] = p + 1;
  const last = timed ? line.issued[n] : n;
  starts[2 * n] = last;
  const levels = [];  // levels that take time
  const first = new Int32Array(2 * n + 2);  // the first such level at or after each level
  for (let l = 0; l < 2 * n; l += 1) {
    first[l] = levels.length;
    if (starts[l + 1] > starts[l]) levels.push(l);
  }
  first[2 * n] = first[2 * n + 1] = levels.length;
  const edges = [...levels.map((l) => starts[l]), last];
  const bytesAt = (l) => (l % 2 ? line.after : line.during)[l >> 1] || 0;

  // -- bands: stacked by part, then by begin -----------------------------------------------------
  const partOf = (what) => (what < -graph.nodes.length ? 4 : what < 0 ? 3 : ["state", "activation", "gradient"].indexOf(graph.tensors[what][3]));
  const bands = line.stays.map(([what, bytes, begin, end, origin, stored, givenAt, given, replaced, ...reads]) => ({
    what, bytes, begin, end, origin, stored, given, givenAt, replaced, reads, part: partOf(what),
    from: 2 * Math.max(begin, 0), to: Math.min(2 * end + 1, 2 * n), runs: [],
  }));
  const order = (band) => (band.part + 1) % 5;  // reserved bytes are the lowest band
  bands.sort((a, b) => order(a) - order(b) || a.from - b.from || b.to - a.to || a.what - b.what);
  const base = new Float64Array(levels.length);
  const heightAt = (band, l) => band.bytes - (band.givenAt >= 0 && l >= 2 * band.givenAt ? band.given : 0);
  for (const band of bands) {
    for (let v = first[band.from]; v < first[band.to]; v += 1) {
      const low = base[v], high = low + heightAt(band, levels[v]);
      const run = band.runs[band.runs.length - 1];
      if (run && run[2] === low && run[3] === high) run[1] = v + 1;
      else band.runs.push([v, v + 1, low, high]);
      base[v] = high;
    }
  }
  const alive = (l) => bands.filter((band) => band.from <= l && l < band.to && heightAt(band, l) > 0);
  const height = Math.max(1, ...line.during, ...line.ghost[1]);
  return { timed, starts, last, levels, first, edges, bytesAt, bands, heightAt, alive, height };
};
