// RAM of the board that a training step uses: a bar for each schedule, and keep-all below.
page.define("gauge", (chart, gauge) => {
  const NAMES = ["state", "activations", "gradients", "workspace"];
  const MOST = 2.2;  // ratio to the largest bar of a schedule above which bars are cut
  const rows = [...gauge.rows, ...gauge.keep_all.map((row) => ({ ...row, apart: true }))];
  const devices = new Set(rows.map((row) => row.device));
  const needs = (row) => row.parts.reduce((sum, part) => sum + part, 0);
  const whole = Math.min(
    MOST * Math.max(...gauge.rows.map((row) => Math.max(row.ram, needs(row)))),
    Math.max(...rows.map((row) => Math.max(row.ram, needs(row)))),
  );
  const share = (bytes) => `${(100 * Math.min(1, bytes / whole)).toFixed(3)}%`;
  const line = (row) => {
    const found = page.make("div", `gauge-line${row.apart ? " apart" : ""}${row.missing ? " missing" : ""}`);
    const words = page.make("p", "gauge-words");
    const name = row.apart ? `keep-all${devices.size > 1 ? ` on ${row.device}` : ""}` : gauge.rows.length > 1 ? row.label : "this schedule";
    words.append(page.make("b", "", name), row.missing
      ? ` ${page.size(row.missing)} missing of ${page.size(row.ram)}: it does not train there`
      : ` ${page.size(row.free)} of ${page.size(row.ram)} free: it trains there`);
    const bar = page.make("div", "gauge-bar");
    const room = page.make("u");
    room.style.width = share(row.ram);
    bar.append(room);
    let left = 0;
    row.parts.forEach((part, k) => {
      if (!part) return;
      const piece = page.make("i", NAMES[k]);
      piece.style.left = share(left);
      piece.style.width = `${(100 * (Math.min(whole, left + part) - Math.min(whole, left)) / whole).toFixed(3)}%`;
      piece.title = `${NAMES[k]} ${page.size(part)}`;
      bar.append(piece);
      left += part;
    });
    if (left > whole) bar.append(page.make("s", "cut"));
    const end = page.make("b");
    end.style.left = share(row.ram);
    bar.append(end);
    const parts = page.make("ul", "keys");
    row.parts.forEach((part, k) => {
      if (!part) return;
      const key = page.make("li");
      key.append(page.make("i", NAMES[k]), `${NAMES[k]} ${page.size(part)}`);
      parts.append(key);
    });
    found.append(words, bar, parts);
    return found;
  };
  const draw = async () => { chart.div.replaceChildren(...rows.map(line)); };
  return { draw };
});
