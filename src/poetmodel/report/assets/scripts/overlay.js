// RAM of several schedules over one time axis, each with its budget.
page.define("overlay", (chart, found) => {
  const { div } = chart;
  const last = Math.max(...found.curves.map((curve) => curve.x[curve.x.length - 1]));
  const DASHES = ["solid", "solid", "solid", "dot", "dot", "dot"];
  const colour = (at) => found.colours[at % found.colours.length][page.skin.colour];
  let cursor = null;
  const at = (curve, x) => (x > curve.x[curve.x.length - 1] ? null : curve.y[page.lastUpTo(x, curve.x.length, (place) => curve.x[place])]);
  const keys = () => {
    const list = page.$(`${div.id}-keys`);
    if (!list) return;
    list.replaceChildren(...found.curves.map((curve, k) => {
      const mark = page.make("i");
      mark.style.background = colour(k);
      return page.make("li", "", mark, `${curve.label}: ${page.plain(curve.name)}${curve.budget_name ? `, budget ${curve.budget_name}` : ""}`);
    }));
  };
  const draw = () => {
    keys();
    const traces = found.curves.map((curve, k) => ({
      type: "scatter", mode: "lines", name: curve.label, x: curve.x, y: curve.y, hoverinfo: "skip",
      line: { shape: "hv", color: colour(k), width: 1.6, dash: DASHES[k % DASHES.length] },
    }));
    const budgets = [...new Set(found.curves.map((curve) => curve.budget))].filter((budget) => budget !== null);
    for (const budget of budgets) {
      const own = found.curves.findIndex((curve) => curve.budget === budget);
      const shared = found.curves.filter((curve) => curve.budget === budget).length > 1;
      traces.push({ type: "scatter", mode: "lines", x: [0, last], y: [budget, budget], hoverinfo: "skip", line: { color: shared ? page.skin.limit : colour(own), dash: "dash", width: 1.2 } });
    }
    const notes = budgets.map((budget) => ({
      x: 1, xref: "paper", y: budget, xanchor: "right", yanchor: "bottom", showarrow: false, font: { size: 11, color: page.skin.faint },
      text: `budget ${found.curves.filter((curve) => curve.budget === budget).map((curve) => curve.label).join(", ")}`,
    }));
    const top = 1.12 * Math.max(...budgets, ...found.curves.map((curve) => curve.y.reduce((most, y) => Math.max(most, y), 0)));
    div.dataset.axes = "xaxis";
    div.whole = { xaxis: [0, last] };
    return window.Plotly.react(div, traces, page.layout({
      uirevision: "kept", annotations: notes, shapes: page.upright(cursor), hovermode: false,
      xaxis: page.axis({ title: { text: `time [${found.time}]`, standoff: 4 }, range: div.whole.xaxis, minallowed: 0, maxallowed: last }),
      yaxis: page.axis({ title: { text: `RAM [${found.size}]`, standoff: 4 }, range: [0, top], fixedrange: true }),
    }), page.config());
  };
  const read = (x) => {
    cursor = x;
    if (div._fullLayout) window.Plotly.relayout(div, { shapes: page.upright(cursor) });
    if (x === null) { chart.say(""); return; }
    chart.say(`at ${page.number(x)} ${found.time}: ${found.curves.map((curve) => {
      const y = at(curve, x);
      return `${curve.label} ${y === null ? "done" : `${page.number(y)} ${found.size}`}`;
    }).join(", ")}`);
  };
  const key = (name) => {
    const step = { ArrowLeft: -0.01, ArrowRight: 0.01, PageUp: -0.1, PageDown: 0.1, Home: -1, End: 1 }[name];
    if (!step) return false;
    read(page.within((cursor === null ? (step > 0 ? -step * last : 0) : cursor) + step * last, last));
    return true;
  };
  return { draw, read, key };
});
