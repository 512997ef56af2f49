// <time-ago us="...">: shows how long ago a time was, counted in the browser, so that a page is not sent again for it.
// Its light DOM holds the time of day, and a morph of the page changes only that.
// <local-time us="...">: shows the <time> in it as a time of day in the browser's zone; with `whole`, with its date.
(() => {
  let serverAheadMs = 0;

  const format = (seconds) => {
    if (seconds < 1) return "now";
    if (seconds < 60) return `${Math.floor(seconds)} s ago`;
    if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
    if (seconds < 86400) {
      const minutes = Math.floor((seconds % 3600) / 60);
      return `${Math.floor(seconds / 3600)} h ${minutes ? `${minutes} min ` : ""}ago`;
    }
    return `${Math.floor(seconds / 86400)} d ago`;
  };

  // The date and time in the browser's zone, which it names.
  const localTime = (time) =>
    time ? new Date(time.dateTime).toLocaleString([], { dateStyle: "medium", timeStyle: "long" }) : "";

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
      const age = format((Date.now() + serverAheadMs) / 1000 - us / 1e6);
      if (this.face.textContent !== age) this.face.textContent = age;
      this.title = localTime(this.querySelector("time"));
    }
  }

  class LocalTime extends HTMLElement {
    static observedAttributes = ["us", "whole"];

    connectedCallback() {
      this.face ??= this.attachShadow({ mode: "open" }).appendChild(document.createElement("span"));
      this.show();
    }

    attributeChangedCallback() {
      if (this.face) this.show();
    }

    show() {
      const time = this.querySelector("time");
      const clock = new Date(time.dateTime).toLocaleTimeString([], { hour12: false, timeZoneName: "short" });
      this.title = localTime(time);
      this.face.textContent = this.hasAttribute("whole") ? this.title : clock;
    }
  }

  const start = () => {
    serverAheadMs = Number(document.body.dataset.nowUs) / 1000 - Date.now();
    customElements.define("time-ago", TimeAgo);
    customElements.define("local-time", LocalTime);
    setInterval(() => document.querySelectorAll("time-ago").forEach((age) => age.tick()), 1000);
  };
  document.addEventListener("DOMContentLoaded", start);
})();
