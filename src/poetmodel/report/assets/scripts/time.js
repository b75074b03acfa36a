// Core, bus and RAM over time.
page.define("time", (chart, line) => {
  const { div } = chart;
  const lanes = line.lanes.length > 0;
  const order = line.bars.map((bar, at) => [bar[2], at]).sort((a, b) => a[0] - b[0]).map((entry) => entry[1]);
  let cursor = -1;
  const draw = () => {
    const traces = [];
    const least = 0.002 * (line.x[line.x.length - 1] || 1);
    page.data.kinds.forEach((_, kind) => {
      const bars = line.bars.filter((bar) => bar[1] === kind);
      if (!bars.length) return;
      traces.push({
        type: "bar", orientation: "h", yaxis: "y2", base: bars.map((bar) => bar[2]), x: bars.map((bar) => bar[3]), y: bars.map((bar) => line.lanes[bar[0]]),
        hovertext: bars.map((bar) => page.escaped(bar[4])), hoverinfo: "text", name: page.data.kinds[kind].name, textposition: "none",
        marker: { color: page.colour(kind), line: { width: 0.5, color: bars.map((bar) => (bar[3] < least ? page.colour(kind) : page.skin.ground)) }, pattern: kind === page.data.stall ? { shape: "/", fillmode: "overlay", fgcolor: page.skin.ground, fgopacity: 0.6, size: 6, solidity: 0.25 } : undefined },
      });
    });
    traces.push({ type: "scatter", mode: "lines", x: line.x, y: line.y, text: line.texts ? line.texts.map(page.escaped) : undefined, hovertemplate: line.texts ? "%{text}<extra></extra>" : `%{y:.4g} ${line.size} at %{x:.5g} ${line.time}<extra></extra>`, line: { shape: "hv", color: page.skin.curve, width: 1 }, fill: "tozeroy", fillcolor: page.skin.colour === "dark" ? "rgba(180,192,202,.18)" : "rgba(61,74,85,.16)" });
    if (line.band !== null) traces.push({ type: "scatter", mode: "lines", x: [line.x[0], line.x[line.x.length - 1]], y: [line.band, line.band], line: { color: page.skin.curve, width: 1, dash: "dot" }, fill: "tozeroy", fillcolor: page.skin.colour === "dark" ? "rgba(180,192,202,.35)" : "rgba(61,74,85,.32)", hoverinfo: "text", hovertext: line.band_name });
    if (line.limit !== null) traces.push({ type: "scatter", mode: "lines", x: [line.x[0], line.x[line.x.length - 1]], y: [line.limit, line.limit], line: { color: page.skin.limit, dash: "dash", width: 1.5 }, hoverinfo: "text", hovertext: line.limit_name });
    traces.push({ type: "scatter", mode: "markers", x: [line.peak.x], y: [line.peak.y], hovertext: [page.escaped(line.peak.text)], hoverinfo: "text", marker: { size: 11, symbol: "diamond-open", color: page.skin.limit, line: { width: 2 } } });
    const notes = [{ x: line.peak.x, y: line.peak.y, text: page.narrow() ? "peak step" : `peak: ${page.escaped(line.peak.name)}`, showarrow: true, ax: line.peak.late ? -36 : 36, ay: 34, xanchor: line.peak.late ? "right" : "left", font: { size: 11, color: page.skin.ink }, bgcolor: page.skin.ground, arrowcolor: page.skin.limit }];
    if (line.limit !== null) notes.push({ x: 1, xref: "paper", y: line.limit, yanchor: "bottom", xanchor: "right", showarrow: false, text: line.limit_name, font: { size: 11, color: page.skin.limit } });
    if (line.band !== null) notes.push({ x: 0, xref: "paper", y: line.band / 2, yanchor: "middle", xanchor: "left", showarrow: false, text: line.band_name, font: { size: 11, color: page.skin.ink } });
    div.dataset.axes = "xaxis";
    div.whole = { xaxis: [line.x[0], line.x[line.x.length - 1]] };
    return window.Plotly.react(div, traces, page.layout({
      barmode: "overlay", bargap: 0.12, annotations: notes, uirevision: "kept",
      xaxis: page.axis({ title: { text: line.x_name, standoff: 4 }, range: div.whole.xaxis, minallowed: line.x[0], maxallowed: line.x[line.x.length - 1] }),
      yaxis: page.axis({ title: { text: `RAM [${line.size}]`, standoff: 4 }, rangemode: "tozero", range: [0, line.top], domain: lanes ? [0, 0.6] : [0, 1], fixedrange: true }),
      ...(lanes ? { yaxis2: page.axis({ type: "category", categoryorder: "array", categoryarray: line.lanes, autorange: "reversed", domain: [0.66, 1], fixedrange: true, showgrid: false }) } : {}),
    }), page.config());
  };
  const hover = (event) => {
    const point = event.points[0];
    chart.say(page.pointed(event) || `${Number(point.y).toPrecision(5)} ${line.size} at ${Number(point.x).toPrecision(5)} ${line.time}`);
  };
  const points = lanes ? order.length : line.x.length;
  const key = (name) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -points, End: points, PageUp: -10, PageDown: 10 }[name];
    if (!step) return false;
    cursor = Math.min(points - 1, Math.max(0, cursor + step));
    const bar = lanes ? line.bars[order[cursor]] : [0, 0, line.x[cursor], 0, line.texts[cursor]];
    chart.say(bar[4]);
    window.Plotly.relayout(div, { shapes: [{ type: "rect", xref: "x", yref: "paper", x0: bar[2], x1: bar[2] + bar[3], y0: 0, y1: 1, fillcolor: page.skin.limit, opacity: 0.35, line: { color: page.skin.limit, width: 1 } }] });
    return true;
  };
  return { draw, hover, key };
});
