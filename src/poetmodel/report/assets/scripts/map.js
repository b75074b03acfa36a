// The map of stages and nodes.
page.define("map", (chart, map) => {
  const { div } = chart;
  const NOTHING = [0, false, "not in RAM at the start of the stage; no action"];
  const n = map.columns.length;
  const filled = (value) => Array.from({ length: n }, () => new Array(n).fill(value));
  let codes;
  let texts;
  const named = (row, column) => `${map.columns[column]}, stage ${row} (${map.columns[row]})`;
  const lines = (row, column, label) => `${named(row, column)}: ${label[2]}`;
  const marks = { x: [], y: [], text: [] };
  const at = new Map();
  const fill = () => {
    codes = filled(null);
    texts = filled("");
    for (const [column, first, last, which] of map.runs) {
      const label = map.labels[which];
      const head = `<b>${page.escaped(map.columns[column])}</b><br>stage `;
      const tail = `<br>${page.escaped(label[2]).replace(/; /g, "<br>")}`;
      for (let row = first; row <= last; row += 1) {
        codes[row][column] = label[0];
        texts[row][column] = `${head}${row} (${page.escaped(map.columns[row])})${tail}`;
        at.set(row * n + column, label);
        if (label[1]) { marks.x.push(column); marks.y.push(row); marks.text.push(texts[row][column]); }
      }
    }
  };
  const cursor = [0, 0];
  const draw = () => {
    if (!codes) fill();
    const steps = page.data.kinds.length;
    const scale = page.data.kinds.flatMap((_, kind) => [[kind / steps, page.colour(kind)], [(kind + 1) / steps, page.colour(kind)]]);
    const names = { title: { text: "node", standoff: 4 }, showgrid: false, zeroline: false, nticks: page.narrow() ? 5 : 12 };
    const traces = [
      { type: "heatmap", z: codes, text: texts, hoverinfo: "text", colorscale: scale, zmin: -0.5, zmax: steps - 0.5, showscale: false, xgap: n < 120 ? 1 : 0, ygap: n < 120 ? 1 : 0 },
      { type: "scatter", mode: "markers", x: marks.x, y: marks.y, text: marks.text, hoverinfo: "text", marker: { symbol: "triangle-down", size: n < 120 ? 9 : 6, color: page.colour(page.data.marked), line: { width: 0.5, color: page.skin.ground } } },
    ];
    div.dataset.axes = "xaxis yaxis";
    div.whole = { xaxis: [-0.5, n - 0.5], yaxis: [n - 0.5, -0.5] };
    return window.Plotly.react(div, traces, page.layout({
      xaxis: page.axis({ ...names, range: div.whole.xaxis }),
      yaxis: page.axis({ ...names, title: { text: "stage", standoff: 4 }, range: div.whole.yaxis }),
      uirevision: "kept",
    }), page.config());
  };
  const tell = (row, column) => chart.say(lines(row, column, at.get(row * n + column) || NOTHING));
  const hover = (event) => tell(event.points[0].y, event.points[0].x);
  const key = (name) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -n], End: [0, n], PageUp: [-10, 0], PageDown: [10, 0] }[name];
    if (!step) return false;
    for (const side of [0, 1]) cursor[side] = Math.min(n - 1, Math.max(0, cursor[side] + step[side]));
    const [row, column] = cursor;
    tell(row, column);
    window.Plotly.relayout(div, { shapes: [{ type: "rect", x0: column - 0.6, x1: column + 0.6, y0: row - 0.6, y1: row + 0.6, line: { color: page.skin.limit, width: 3 } }] });
    return true;
  };
  return { draw, hover, key };
});
