// The explored CHOICE of the API: its form controls, and its query parameters in the address.
const choices = (() => {
  const { $ } = page;
  const PLAIN = JSON.parse($("problem").dataset.defaults);
  const number = (text) => (/^\d+$/.test(text) ? Number(text) || null : text);
  const FIELDS = ["model", "device", ...Object.keys(PLAIN)];

  // -- the address: fields that differ from their defaults ---------------------------------------
  const stated = (choice) => FIELDS
    .filter((name) => (name in PLAIN ? choice[name] !== PLAIN[name] : choice[name]))
    .map((name) => [name, typeof choice[name] === "boolean" ? Number(choice[name]) : choice[name]]);
  const read = (query, initial) => {
    const found = { ...PLAIN, ...(query.has("model") ? { model: initial.model, device: initial.device } : initial) };
    for (const name of FIELDS) {
      if (!query.has(name)) continue;
      const text = query.get(name);
      found[name] = typeof PLAIN[name] === "boolean" ? text !== "0" : name === "tile" ? text : number(text);
    }
    return Object.fromEntries(FIELDS.map((name) => [name, found[name]]));
  };

  // -- the controls ------------------------------------------------------------------------------
  const fill = ({ models, devices }) => {
    const groups = new Map();
    for (const { name, group } of models) groups.set(group, [...(groups.get(group) || []), name]);
    $("model").replaceChildren(...Array.from(groups, ([group, names]) => {
      const found = page.make("optgroup", "", ...names.map((name) => new Option(name)));
      found.label = group;
      return found;
    }));
    $("device").replaceChildren(...devices.map(({ name, ram_bytes }) => new Option(`${name} (${units.bytes(ram_bytes)})`, name)));
  };
  const show = (choice) => {
    for (const name of FIELDS) {
      const field = $(name);
      if (!field) continue;
      if (field.type === "checkbox") field.checked = choice[name];
      else field.value = choice[name] ?? "";
    }
    for (const name of ["train", "tile", "commit"]) $(name).parentElement.hidden = !choice.state;
    const words = [choice.model, choice.device, choice.batch && `batch ${choice.batch}`, choice.state, choice.train && `train ${choice.train}`, choice.tile && `tiles of ${choice.tile}`, choice.in_place && "in place", !choice.paging && "no paging", !choice.recompute && "no recomputation", choice.commit && (choice.commit > 1 ? `commit every ${choice.commit} steps` : "commit"), choice.minimize !== "energy" && `least ${choice.minimize}`];
    $("problem-words").textContent = words.filter(Boolean).join(" · ");
  };
  const changed = (choice, field) => {  // the choice after a change of a control; null for other controls
    if (!FIELDS.includes(field.name)) return null;
    const value = field.type === "checkbox" ? field.checked : field.type === "number" ? Number(field.value) || null : field.value || null;
    const found = { ...choice, [field.name]: value };
    return found.state ? found : { ...found, train: null, tile: null, commit: null };
  };
  return { stated, read, fill, show, changed };
})();
