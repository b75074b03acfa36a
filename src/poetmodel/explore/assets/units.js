// Format and parse sizes, times and energies.
const units = (() => {
  const SIZES = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30 };
  const TIMES = { ns: 1e-9, us: 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600 };
  const FORM = /^\s*(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)\s*([a-zµμ]*|%)\s*$/i;
  const figures = (value, digits) => value.toLocaleString("en", { maximumSignificantDigits: digits });
  const bytes = (value) => {
    const [unit, factor] = page.unitOf(value);
    return `${(factor === 1 ? Math.round(value) : value / factor).toLocaleString("en", { maximumFractionDigits: 2 })} ${unit}`;
  };
  const engineering = (value, unit) => {
    if (!value) return `0 ${unit}`;
    for (const [prefix, factor] of [["k", 1e3], ["", 1], ["m", 1e-3], ["u", 1e-6]]) {
      if (Math.abs(value) >= factor && (prefix !== "k" || unit === "J")) return `${figures(value / factor, 4)} ${prefix}${unit}`;
    }
    return `${figures(value / 1e-9, 3)} n${unit}`;
  };
  const seconds = (value) => (value >= 7200 ? `${figures(value / 3600, 3)} h` : value >= 120 ? `${figures(value / 60, 3)} min` : engineering(value, "s"));
  const share = (value) => {
    const percent = Math.abs(100 * value) < 1e-7 ? 0 : 100 * value;
    return percent && Math.abs(percent) < 0.001 ? "<0.001 %" : `${figures(percent, Math.abs(percent) < 1 ? 2 : 3)} %`;
  };
  const read = (text, known, whole, bare) => {
    const found = FORM.exec(text);
    if (!found) return null;
    const unit = found[2].replace(/[µμ]/, "u");
    if (unit === "%") return (Number(found[1]) / 100) * whole;
    if (!unit) return bare === null ? null : Number(found[1]) * bare;
    const name = unit in known ? unit : Object.keys(known).find((each) => each.toLowerCase() === unit.toLowerCase());
    return name ? Number(found[1]) * known[name] : null;
  };
  // Values that the server also accepts; null for others.
  const within = (value, least, most) => (value !== null && value >= least && value <= most ? value : null);
  return {
    bytes, seconds, share, joules: (value) => engineering(value, "J"),
    readBytes: (text, whole) => { const found = read(text, SIZES, whole, 1); return within(found === null ? null : Math.floor(found), 1, 2 ** 53); },
    readSeconds: (text, whole) => { const found = read(text, TIMES, whole, null); return within(found === null ? null : Number(found.toPrecision(12)), 1e-300, 1e12); },
  };
})();
