// The map of stages and nodes. Cells smaller than the minimum mark get a mark of this size, so that
// recomputations and transfers are visible at every scale.
page.define("map", (chart, map) => {
  const { graph } = page;  // the graph of these data, even if the page has another one now
  const { div } = chart;
  const NOTHING = [0, false, "not in RAM at the start of the stage; no action"];
  const LEAST = 5;
  const MANY = 2500;
  const n = map.columns.length;
  const marked = page.data.kinds.findIndex((kind) => kind.key === "paged_out");
  const seen = ["computed", "recomputed", "paged_in"].map((key) => page.data.kinds.findIndex((kind) => kind.key === key));
  const named = (row, column) => `${map.columns[column]}, stage ${row} (${map.columns[row]})`;
  const at = new Map();
  let codes;
  const marks = new Map([...seen, marked].map((kind) => [kind, { x: [], y: [] }]));
  const fill = () => {
    codes = Array.from({ length: n }, () => new Array(n).fill(null));
    for (const [column, first, last, which] of map.runs) {
      const label = map.labels[which];
      for (let row = first; row <= last; row += 1) {
        codes[row][column] = label[0];
        at.set(row * n + column, label);
        for (const kind of [label[0], label[1] ? marked : -1]) {
          if (marks.has(kind)) { marks.get(kind).x.push(column); marks.get(kind).y.push(row); }
        }
      }
    }
  };
  const labelAt = (row, column) => at.get(row * n + column) || NOTHING;

  // -- the size of cells in pixels, and of marks ---------------------------------------------------
  const sizes = () => {
    const { xaxis, yaxis } = div._fullLayout;
    return [xaxis, yaxis].map((axis) => axis._length / Math.max(1e-9, Math.abs(axis.range[1] - axis.range[0])));
  };
  const markers = () => {
    const cell = div._fullLayout && div._fullLayout.xaxis ? Math.min(...sizes()) : 1;
    return Array.from(marks, ([kind, { x }]) => ({
      symbol: kind === marked ? "triangle-down" : "square", color: page.colour(kind),
      size: kind === marked ? Math.min(11, Math.max(LEAST + 2, cell)) : kind === seen[0] ? 3 : LEAST,
      opacity: kind !== marked && cell >= LEAST ? 0 : x.length > MANY ? 0.6 : 1,
      line: { width: kind === marked ? 0.7 : 0, color: page.skin.ground },
    }));
  };
  let fitted = "";
  const fit = () => {
    const wanted = markers();
    const key = JSON.stringify(wanted);
    if (key === fitted) return;
    fitted = key;
    window.Plotly.restyle(div, { marker: wanted }, wanted.map((_, place) => place + 1));
  };

  // -- pointer and selection -----------------------------------------------------------------------
  const cursor = { row: 0, column: 0, keys: false };
  const shapes = () => {
    const found = [];
    const tensor = page.selected === null || graph !== page.graph ? null : graph.tensors[page.selected];
    if (tensor) found.push({ type: "rect", layer: "above", x0: tensor[2] - 0.5, x1: tensor[2] + 0.5, y0: tensor[2] - 0.5, y1: n - 0.5, line: { color: page.skin.ink, width: 1.5 }, fillcolor: page.skin.ink, opacity: 0.35 });
    const { row, column } = cursor;
    if (cursor.keys) found.push({ type: "rect", x0: column - 0.6, x1: column + 0.6, y0: row - 0.6, y1: row + 0.6, line: { color: page.skin.limit, width: 3 } });
    return found;
  };
  const reshape = () => window.Plotly.relayout(div, { shapes: shapes() });
  const tell = () => chart.say(`${named(cursor.row, cursor.column)}: ${labelAt(cursor.row, cursor.column)[2]}`);
  // The cell below the pointer, or the nearest mark that covers the pointer.
  const under = (event) => {
    if (!div._fullLayout) return null;
    const box = div.getBoundingClientRect();
    const { xaxis, yaxis } = div._fullLayout;
    const [x, y] = [xaxis.p2d(event.clientX - box.x - xaxis._offset), yaxis.p2d(event.clientY - box.y - yaxis._offset)];
    const [column, row] = [Math.round(x), Math.round(y)];
    const inside = (value, axis) => value >= Math.min(...axis.range) && value <= Math.max(...axis.range);
    if (column < 0 || row < 0 || column >= n || row >= n || !inside(x, xaxis) || !inside(y, yaxis)) return null;
    const [wide, high] = sizes();
    if (Math.min(wide, high) >= LEAST) return [row, column];
    let best = [row, column, (LEAST / 2 + 1) ** 2];
    for (const [kind, { x: columns, y: rows }] of marks) {
      if (kind === seen[0]) continue;
      for (let place = 0; place < columns.length; place += 1) {
        const far = ((columns[place] - x) * wide) ** 2 + ((rows[place] - y) * high) ** 2;
        if (far < best[2]) best = [rows[place], columns[place], far];
      }
    }
    return best;
  };
  const hint = (event) => {
    const tip = div.querySelector(":scope > .tip");
    const found = event && under(event);
    tip.hidden = !found;
    if (!found) return;
    [cursor.row, cursor.column] = found;
    const [, , words] = labelAt(...found);
    tip.replaceChildren(page.make("b", "", map.columns[found[1]]), ...[`stage ${found[0]} (${map.columns[found[0]]})`, ...words.split("; ")].flatMap((line) => [page.make("br"), line]));
    const box = div.getBoundingClientRect();
    const [x, y] = [event.clientX - box.x, event.clientY - box.y];
    tip.style.left = `${x + 14 + tip.offsetWidth > box.width ? Math.max(2, x - 14 - tip.offsetWidth) : x + 14}px`;
    tip.style.top = `${Math.min(y + 12, box.height - tip.offsetHeight - 4)}px`;
    tell();
  };
  const pick = () => {
    const made = graph.tensors.flatMap((tensor, i) => (tensor[2] === cursor.column ? [i] : []));
    page.select(made[made.indexOf(page.selected) + 1] ?? null);
  };
  const listen = () => {
    if (chart.tip) return;
    chart.tip = true;
    div.addEventListener("pointermove", (event) => { if (event.buttons === 0) chart.hint(event); });
    div.addEventListener("pointerleave", () => chart.hint(null));
    let from = null;
    div.addEventListener("pointerdown", (event) => { from = [event.clientX, event.clientY]; }, true);
    div.addEventListener("pointerup", (event) => {
      const still = from && Math.hypot(event.clientX - from[0], event.clientY - from[1]) < 4;
      if (still && !event.target.closest(".modebar") && chart.under(event)) { chart.hint(event); chart.pick(); }
    }, true);
    div.on("plotly_relayout", () => chart.fit());
  };
  const draw = async () => {
    if (!codes) fill();
    const steps = page.data.kinds.length;
    const scale = page.data.kinds.flatMap((_, kind) => [[kind / steps, page.colour(kind)], [(kind + 1) / steps, page.colour(kind)]]);
    const names = { title: { text: "node", standoff: 4 }, showgrid: false, zeroline: false, nticks: page.narrow() ? 5 : 12, ...(n <= 12 ? { dtick: 1 } : {}) };
    const styles = markers();
    const traces = [
      { type: "heatmap", z: codes, hoverinfo: "none", colorscale: scale, zmin: -0.5, zmax: steps - 0.5, showscale: false, xgap: n < 120 ? 1 : 0, ygap: n < 120 ? 1 : 0 },
      ...Array.from(marks.values(), ({ x, y }, place) => ({ type: "scatter", mode: "markers", x, y, hoverinfo: "skip", marker: styles[place] })),
    ];
    div.dataset.axes = "xaxis yaxis";
    div.whole = { xaxis: [-0.5, n - 0.5], yaxis: [n - 0.5, -0.5] };
    await window.Plotly.react(div, traces, page.layout({
      xaxis: page.axis({ ...names, range: div.whole.xaxis }),
      yaxis: page.axis({ ...names, title: { text: "stage", standoff: 4 }, range: div.whole.yaxis }),
      uirevision: "kept", shapes: shapes(),
    }), page.config());
    if (!div.querySelector(":scope > .tip")) {
      const tip = page.make("div", "tip");
      tip.hidden = true;
      div.append(tip);
    }
    Object.assign(chart, { hint, under, pick, fit });
    listen();
    fitted = "";
    fit();
  };
  const key = (name) => {
    if (name === "Enter" || name === " ") { pick(); return true; }
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -n], End: [0, n], PageUp: [-10, 0], PageDown: [10, 0] }[name];
    if (!step) return false;
    Object.assign(cursor, { row: page.within(cursor.row + step[0], n - 1), column: page.within(cursor.column + step[1], n - 1), keys: true });
    tell();
    reshape();
    return true;
  };
  return { draw, key, click: () => {}, light: reshape, centre: () => ({ xaxis: cursor.column, yaxis: cursor.row }) };
});
