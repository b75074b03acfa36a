// Incumbent and bound over the time of a solve; what is open between them is shaded.
page.define("progress", (chart, found) => {
  const { div } = chart;
  const rows = found.history;
  const first = Math.max(rows[0][0], 1e-4), last = Math.max(rows[rows.length - 1][0], first * 1.01);
  const log = last > 30 * first;
  const scaled = (value) => (value === null ? null : value / found.factor);
  const xs = rows.map((row) => Math.max(row[0], first));
  const best = rows.map((row) => scaled(row[1])), least = rows.map((row) => scaled(row[2]));
  const COLOURS = { light: ["#0072B2", "#007A58", "rgba(0,114,178,.13)"], dark: ["#4AA3DF", "#23C497", "rgba(74,163,223,.17)"] };
  let cursor = null;
  const words = (value) => (value === null ? "none yet" : `${page.number(value)}${found.unit ? ` ${found.unit}` : ""}`);
  const draw = () => {
    const [blue, green, shade] = COLOURS[page.skin.colour];
    const known = rows.findIndex((row) => row[1] !== null && row[2] !== null);
    const open = known < 0 ? [] : xs.slice(known);
    const traces = known < 0 ? [] : [
      { type: "scatter", mode: "lines", x: open, y: least.slice(known), line: { shape: "hv", width: 0 }, hoverinfo: "skip" },
      { type: "scatter", mode: "lines", x: open, y: best.slice(known), line: { shape: "hv", width: 0 }, fill: "tonexty", fillcolor: shade, hoverinfo: "skip" },
    ];
    const curve = (name, y, color) => ({ type: "scatter", mode: "lines", name, x: xs, y, line: { shape: "hv", color, width: 2 }, hoverinfo: "skip" });
    traces.push(curve("best schedule", best, blue), curve("bound", least, green));
    const end = best[best.length - 1] === null ? least[least.length - 1] : best[best.length - 1];
    traces.push({ type: "scatter", mode: "markers", x: [xs[xs.length - 1]], y: [end], hoverinfo: "skip", cliponaxis: false, marker: { size: 10, symbol: found.proven ? "circle" : "circle-open", color: blue, line: { width: 2, color: blue } } });
    const values = [...best, ...least].filter((value) => value !== null);
    const low = Math.min(...values), high = Math.max(...values), pad = 0.08 * (high - low || Math.abs(high) || 1);
    const base = low < 0.5 * high ? Math.min(0, low) : low - pad;
    const at = (y, text, color, yanchor) => ({ x: 0, xref: "paper", xanchor: "left", y, yanchor, showarrow: false, text, font: { size: 12, color } });
    const notes = [];
    const start = best.find((value) => value !== null), floor = least.find((value) => value !== null);
    if (start !== undefined) notes.push(at(start, "best schedule", blue, "bottom"));
    if (floor !== undefined) notes.push(at(floor, "bound", green, floor <= base + pad ? "bottom" : "top"));
    const range = [first, last].map((x) => (log ? Math.log10(x) : x));
    if (cursor === null) chart.say(found.end);
    div.dataset.axes = "xaxis";
    div.whole = { xaxis: range };
    return window.Plotly.react(div, traces, page.layout({
      annotations: notes, shapes: page.upright(cursor), uirevision: "kept", hovermode: false,
      xaxis: page.axis({ title: { text: "time of the solve [s]", standoff: 4 }, range, ...(log ? page.log(first, last) : {}) }),
      yaxis: page.axis({ title: { text: `${found.y_name}${found.unit ? ` [${found.unit}]` : ""}`, standoff: 4 }, range: [base, high + 2 * pad], fixedrange: true }),
    }), page.config());
  };
  const show = (row) => {
    const [seconds, incumbent, bound] = rows[row];
    const gap = incumbent && bound !== null ? `, ${page.number(100 * Math.max(0, incumbent - bound) / incumbent)} % open` : "";
    chart.say(`after ${page.number(seconds)} s: best ${words(best[row])}, bound ${words(least[row])}${gap}`);
  };
  const read = (x) => {
    cursor = x;
    if (div._fullLayout) window.Plotly.relayout(div, { shapes: page.upright(cursor) });
    if (x === null) { chart.say(found.end); return; }
    show(page.lastUpTo(x, rows.length, (row) => rows[row][0]));
  };
  let place = -1;
  const key = (name) => {
    const step = page.step(name, rows.length);
    if (!step) return false;
    place = page.within(place + step, rows.length - 1);
    read(xs[place]);
    show(place);
    return true;
  };
  return { draw, read, key };
});
