// The connection to the server: requests, events, and reconnection. `heard(point)` is called for each
// event, `gone()` if the server has discarded the problem, and `again()` after a reconnection.
const makeServer = (session, { heard, gone, again }) => {
  const { $ } = page;
  const root = document.documentElement;
  const RETRY_MS = 1000;
  let events = null;
  let lost = false;
  let over = false;
  class Refused extends Error {}
  const reason = async (reply) => {
    try { return String((await reply.json()).detail); } catch { return `the server answered ${reply.status}`; }
  };
  const ask = async (path, { body, signal } = {}) => {
    const how = body ? { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) } : {};
    let reply;
    try {
      reply = await fetch(path, { ...how, signal, credentials: "same-origin" });
    } catch (error) {
      if (error.name !== "AbortError") lose();
      throw error;
    }
    if (reply.status === 410 && body) { gone(); throw new DOMException("opened again", "AbortError"); }
    if (reply.status === 403) { shut(); throw new Refused("the address of this page is no longer valid"); }
    if (!reply.ok) throw new Refused(await reason(reply));
    return reply;
  };
  const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.?!]$/.test(text) ? "" : ".");
  // Shows the reason of a refused request; other errors are handled elsewhere.
  const showError = (error, where) => { if (error instanceof Refused) $(where).textContent = sentence(error.message); };
  const listen = () => {
    events = new EventSource(`/api/events?session=${encodeURIComponent(session)}`);
    events.addEventListener("error", lose);
    for (const name of ["point", "front"]) events.addEventListener(name, (event) => heard(JSON.parse(event.data)));
  };
  const lose = () => {
    if (lost || over) return;
    lost = true;
    events?.close();
    root.dataset.connection = "lost";
    $("connection").textContent = "Reconnecting …";
    setTimeout(knock, RETRY_MS);
  };
  const knock = async () => {
    lost = false;
    try { await ask("/api/choices"); } catch { return; }
    root.dataset.connection = "up";
    $("connection").textContent = "";
    again();
  };
  const shut = () => {
    over = true;
    events?.close();
    root.dataset.connection = "over";
    $("connection").textContent = "This address is no longer valid: open the one that poetmodel explore printed.";
  };
  return { ask, showError, listen, sentence, Refused };
};
