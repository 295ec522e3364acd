"use strict";
// The search of these pages runs in a worker, and browsers start none for pages that are opened from a folder. There a
// hidden frame takes its place: it loads the script of the worker, and messages pass between the two windows. MkDocs'
// plugin "offline" would load one from another host if no polyfill had the name of this file.
if (location.protocol === "file:") {
  const load = (page, url) =>
    new Promise((resolve, reject) => {
      const script = page.createElement("script");
      script.onload = resolve;
      script.onerror = () => reject(new Error(`${url} could not be loaded`));
      script.src = url;
      page.body.append(script);
    });

  class FrameWorker extends EventTarget {
    onmessage = null;

    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const scope = this.frame.contentWindow;
      scope.document.write("<body></body>");
      scope.document.close();
      scope.importScripts = async (...urls) => {
        for (const each of urls) await load(scope.document, each);
      };
      scope.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      this.ready = load(scope.document, url);
    }

    postMessage(data) {
      const scope = this.frame.contentWindow;
      const send = () => scope.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
      this.ready.then(send, (error) => console.error(error));
    }

    terminate() {
      this.frame.remove();
    }
  }
  window.Worker = FrameWorker;
  window.IFrameWorker = FrameWorker; // by this name the script of the search knows that its paths are of the page
}
