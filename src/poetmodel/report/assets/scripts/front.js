// The Pareto chart of a sweep.
page.define("front", (chart, front) => {
  const { div } = chart;
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "x", "cross", "star", "pentagon"];
  const points = front.lines.flatMap((line) => line.texts.map((text, at) => [text, line.x[at], line.y[at]]));
  const shares = points.map((point) => point[2]);
  let cursor = -1;
  const draw = () => {
    const traces = front.lines.map((line, at) => ({
      type: "scatter", mode: "lines+markers", name: page.escaped(line.name), x: line.x, y: line.y, hovertext: line.texts.map(page.escaped), hoverinfo: "text",
      line: { color: front.colours[at % front.colours.length][page.skin.colour], width: 1, dash: at < front.colours.length ? "solid" : "dot" },
      marker: { size: 9, symbol: line.proven.map((proven) => SYMBOLS[at % SYMBOLS.length] + (proven ? "" : "-open")) },
    }));
    traces.push({ type: "scatter", mode: "lines", name: "front of energy and RAM", x: front.front.x, y: front.front.y, line: { shape: "hv", color: page.skin.faint, dash: "dash", width: 1.5 }, hoverinfo: "skip" });
    for (const here of front.here) traces.push({ type: "scatter", mode: "markers+text", name: `schedule ${here.name}`, x: [here.x], y: [here.y], text: [here.name], textposition: "top center", hovertext: [here.text], hoverinfo: "text", marker: { size: 15, symbol: "circle-open", color: page.skin.limit, line: { width: 2 } } });
    div.dataset.axes = "xaxis yaxis";
    return window.Plotly.react(div, traces, page.layout({
      showlegend: true, legend: { orientation: "h", y: -0.22 }, uirevision: "kept",
      xaxis: page.axis({ title: { text: `peak RAM [${front.size}]`, standoff: 4 } }), yaxis: page.axis({ title: { text: "energy above a single pass [%]", standoff: 4 }, ...(front.log ? page.log(0.7 * Math.min(...shares), 1.5 * Math.max(...shares)) : { rangemode: "tozero" }) }),
    }), page.config());
  };
  const hover = (event) => chart.say(page.pointed(event));
  const key = (name) => {
    const step = page.step(name, points.length);
    if (!step || !points.length) return false;
    cursor = page.within(cursor + step, points.length - 1);
    const [text, x, y] = points[cursor];
    chart.say(text);
    window.Plotly.relayout(div, { annotations: [page.arrow(x, front.log ? Math.log10(y) : y)] });
    return true;
  };
  return { draw, hover, key };
});
