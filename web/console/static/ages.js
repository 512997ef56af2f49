// <time-ago us="...">: how long ago, counted here, so that a page need not be sent again for time to pass.
// The text it covers is the time of day; a morph of the page changes only that.
(() => {
  const serverAheadMs = () => offset;
  let offset = 0;

  const text = (seconds) => {
    if (seconds < 1) return "now";
    if (seconds < 60) return `${Math.floor(seconds)} s ago`;
    if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
    if (seconds < 86400) {
      const minutes = Math.floor((seconds % 3600) / 60);
      return `${Math.floor(seconds / 3600)} h ${minutes ? `${minutes} min ` : ""}ago`;
    }
    return `${Math.floor(seconds / 86400)} d ago`;
  };

  class TimeAgo extends HTMLElement {
    static observedAttributes = ["us"];

    connectedCallback() {
      this.face ??= this.attachShadow({ mode: "open" }).appendChild(document.createElement("span"));
      this.tick();
    }

    attributeChangedCallback() {
      if (this.face) this.tick();
    }

    tick() {
      const us = Number(this.getAttribute("us"));
      const now = text((Date.now() + serverAheadMs()) / 1000 - us / 1e6);
      if (this.face.textContent !== now) this.face.textContent = now;
      this.title = this.querySelector("time")?.title ?? "";
    }
  }

  const start = () => {
    offset = Number(document.body.dataset.nowUs) / 1000 - Date.now();
    customElements.define("time-ago", TimeAgo);
    setInterval(() => document.querySelectorAll("time-ago").forEach((age) => age.tick()), 1000);
  };
  document.addEventListener("DOMContentLoaded", start);
})();
