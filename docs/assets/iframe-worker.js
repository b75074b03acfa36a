// Browsers start no worker on a page that was opened from a folder. There the script of the search
// runs in a hidden frame instead, which has the same origin as the page. The name tells the plugin
// `offline` that its own way, which loads a script from elsewhere, is not wanted.
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #ready;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const inside = this.#frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      this.#ready = new Promise((resolve) => script.addEventListener("load", resolve));
      script.src = new URL(url, location.href).href;
      inside.document.body.append(script);
    }

    postMessage(data) {
      this.#ready.then(() => {
        this.#frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
      });
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
