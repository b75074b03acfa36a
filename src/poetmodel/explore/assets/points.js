// All points of a problem: overhead against RAM, coloured by time. A click or Enter selects a point.
page.define("points", (chart, { points, scale, budget_bytes, here, go }) => {
  const { div } = chart;
  const DECADES = 30;
  const TIMES = [["#0b3c5d", "#e69f00"], ["#79bdf0", "#f0b93a"]];
  const held = points.filter((point) => point.energy_j !== null && !point.provisional).sort((a, b) => a.needs_bytes - b.needs_bytes);
  const overhead = (point) => (100 * point.overhead_j) / (point.energy_j - point.overhead_j);
  const proven = (point) => point.status === "optimal";
  const words = (point) => [
    `${units.bytes(point.needs_bytes)} of ${units.bytes(point.ram_bytes)}`, `overhead ${units.share(overhead(point) / 100)}`, units.seconds(point.makespan_s),
    ...(point.deadline_s === null ? [] : [`deadline ${units.seconds(point.deadline_s)}`]), proven(point) ? "proven optimal" : "not proven",
  ].join(", ");
  const x = held.map((point) => point.needs_bytes);
  const shares = held.map(overhead);
  const above = shares.filter((share) => share > 1e-6);
  const log = above.length > 1 && Math.max(...above) > DECADES * Math.min(...above);
  const least = log ? 10 ** Math.floor(Math.log10(Math.min(...above))) : 0;  // position of 0 %
  const y = shares.map((share) => Math.max(share, least));
  const seconds = held.map((point) => point.makespan_s);
  const edge = [];
  held.forEach((point, at) => { if (!edge.length || y[at] < edge[edge.length - 1][1]) edge.push([x[at], y[at]]); });
  let cursor = held.findIndex((point) => point.id === here);

  // Round sizes as axis ticks, as many as fit.
  const ticks = () => {
    const wanted = page.narrow() ? 4 : 8;
    const found = [];
    for (let power = 1; power < 2 ** 50; power *= 2) for (const size of [power, 1.25 * power, 1.5 * power, 1.75 * power]) if (size >= scale.low && size <= scale.high) found.push(size);
    for (const keep of [(size) => Number.isInteger(Math.log2(size / 1.5)) || Number.isInteger(Math.log2(size)), (size) => Number.isInteger(Math.log2(size))]) {
      if (found.length <= wanted) break;
      const fewer = found.filter(keep);
      if (fewer.length > 1) found.splice(0, found.length, ...fewer);
    }
    return found;
  };
  const decades = () => {
    const top = Math.max(...y);
    const values = [least];
    for (let ten = least; ten <= 10 * top; ten *= 10) for (const value of [ten, 3 * ten]) if (value > 1.01 * least && value < 2 * top) values.push(Number(value.toPrecision(3)));
    const zero = Math.min(...shares) < least;
    return { type: "log", range: [Math.log10(least) - 0.1, Math.log10(top) + 0.15], tickvals: values, ticktext: values.map((value) => (zero && value === least ? "0 %" : `${value} %`)) };
  };
  const draw = () => {
    const dark = page.skin.colour === "dark" ? 1 : 0;
    const spread = Math.max(...seconds) > 1.001 * Math.min(...seconds);
    const mark = held.findIndex((point) => point.id === here);
    const traces = [
      { type: "scatter", mode: "lines", x: edge.map((one) => one[0]), y: edge.map((one) => one[1]), line: { shape: "hv", color: page.skin.faint, width: 1, dash: "dot" }, hoverinfo: "skip" },
      {
        type: "scatter", mode: "markers", x, y, hovertext: held.map(words), hoverinfo: "text",
        marker: {
          size: 10, symbol: held.map((point) => (proven(point) ? "circle" : "circle-open")), color: spread ? seconds : TIMES[dark][0],
          ...(spread ? { colorscale: TIMES[dark].map((colour, end) => [end, colour]), showscale: true, colorbar: { title: { text: "time [s]", side: "right", font: { size: 11 } }, thickness: 10, outlinewidth: 0, tickfont: { size: 10 }, nticks: 5 } } : {}),
          line: { width: 1.5 },
        },
      },
    ];
    if (mark >= 0) traces.push({ type: "scatter", mode: "markers", x: [x[mark]], y: [y[mark]], hoverinfo: "skip", marker: { size: 18, symbol: "circle-open", color: page.skin.limit, line: { width: 2 } } });
    const sizes = ticks();
    const ends = [scale.low, scale.high].map((size) => (scale.log ? Math.log10(size) : size));
    div.dataset.axes = "xaxis";
    div.whole = { xaxis: ends };
    return window.Plotly.react(div, traces, page.layout({
      uirevision: "kept",
      shapes: [{ type: "line", xref: "x", yref: "paper", x0: budget_bytes, x1: budget_bytes, y0: 0, y1: 1, line: { color: page.skin.limit, width: 1.5, dash: "dash" } }],
      xaxis: page.axis({ title: { text: "RAM that the schedule needs", standoff: 4 }, type: scale.log ? "log" : "linear", range: ends, tickvals: sizes, ticktext: sizes.map(units.bytes) }),
      yaxis: page.axis({ title: { text: "energy overhead", standoff: 4 }, ...(log ? decades() : { type: "linear", ticksuffix: " %", range: [-0.03, 1.1].map((end) => end * (Math.max(0, ...y) || 1)) }) }),
    }), page.config());
  };
  const leave = (at) => { const point = held[at]; if (point) go(point.ram_bytes, point.deadline_s); };
  const hover = (event) => { if (event.points[0].curveNumber === 1) chart.say(words(held[event.points[0].pointNumber])); };
  const click = (event) => { if (event.points[0].curveNumber === 1) leave(event.points[0].pointNumber); };
  const key = (name) => {
    if (name === "Enter") { leave(cursor); return cursor >= 0; }
    const step = page.step(name, held.length);
    if (!step || !held.length) return false;
    cursor = page.within(cursor + step, held.length - 1);
    chart.say(words(held[cursor]));
    window.Plotly.relayout(div, { annotations: [page.arrow(scale.log ? Math.log10(x[cursor]) : x[cursor], log ? Math.log10(y[cursor]) : y[cursor])] });
    return true;
  };
  return { draw, hover, click, key };
});
