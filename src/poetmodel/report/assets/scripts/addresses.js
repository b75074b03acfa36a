// Chart of addresses over time.
page.define("addresses", (chart, map) => {
  const { div } = chart;
  let cursor = -1;
  const outline = ([, start, length, low, height], color) => ({ type: "rect", x0: start, x1: start + length, y0: low, y1: low + height, line: { color, width: 3 } });
  const shapes = () => [  // every copy of the selected tensor, and the keyboard cursor
    ...map.boxes.filter((box) => page.selected !== null && box[6] === page.selected).map((box) => outline(box, page.skin.ink)),
    ...(cursor < 0 ? [] : [outline(map.boxes[cursor], page.skin.limit)]),
  ];
  const draw = () => {
    const least = 0.002 * map.end;
    const traces = [];
    page.data.kinds.forEach((found, kind) => {
      const boxes = map.boxes.filter((box) => box[0] === kind);
      if (!boxes.length) return;
      traces.push({
        type: "bar", x: boxes.map((box) => box[1] + box[2] / 2), width: boxes.map((box) => box[2]), base: boxes.map((box) => box[3]), y: boxes.map((box) => box[4]),
        hovertext: boxes.map((box) => page.escaped(box[5])), customdata: boxes.map((box) => box[6]), hoverinfo: "text", name: found.name, textposition: "none",
        marker: { color: page.colour(kind), line: { width: 0.5, color: boxes.map((box) => (box[2] < least ? page.colour(kind) : page.skin.ground)) } },
      });
    });
    traces.push({ type: "scatter", mode: "lines", x: [0, map.end], y: [map.limit, map.limit], line: { color: page.skin.limit, dash: "dash", width: 1.5 }, hoverinfo: "text", hovertext: map.limit_name });
    div.dataset.axes = "xaxis yaxis";
    div.whole = { xaxis: [0, map.end], yaxis: [0, 1.05 * map.limit || 1] };
    return window.Plotly.react(div, traces, page.layout({
      barmode: "overlay", uirevision: "kept", shapes: shapes(),
      xaxis: page.axis({ title: { text: map.x_name, standoff: 4 }, range: div.whole.xaxis, minallowed: 0, maxallowed: map.end }),
      yaxis: page.axis({ title: { text: map.y_name, standoff: 4 }, range: div.whole.yaxis }),
    }), page.config());
  };
  const hover = (event) => chart.say(page.pointed(event));
  const light = () => window.Plotly.relayout(div, { shapes: shapes() });
  const click = (event) => {
    const tensor = event.points[0].customdata ?? null;
    hover(event);
    if (tensor !== null) page.select(tensor === page.selected ? null : tensor);
  };
  const key = (name) => {
    const step = page.step(name, map.boxes.length);
    if (!step || !map.boxes.length) return false;
    cursor = page.within(cursor + step, map.boxes.length - 1);
    chart.say(map.boxes[cursor][5]);
    light();
    return true;
  };
  return { draw, hover, click, key, light };
});
