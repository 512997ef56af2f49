// Rows that come while the reader has scrolled do not push away what is read: they are counted, and shown when asked for.
(() => {
  const MAX_LINES = 500;
  const SCROLLED_PX = 140;
  let waiting = 0;

  const fresh = () => document.getElementById("fresh");
  const scrolled = () => window.scrollY > SCROLLED_PX;

  function announce(count) {
    waiting = count;
    fresh().hidden = waiting === 0;
    fresh().textContent = `${waiting} new, show`;
  }

  // Of a message's rows, those that the page has: changed in place, in the order they stand in, the new ones left out.
  function keepPlaces(message) {
    const parsed = new DOMParser().parseFromString(message.data.replaceAll("hx-partial", "template"), "text/html");
    let held = 0;
    for (const template of parsed.querySelectorAll("template")) {
      const rows = template.content.querySelector("[data-live-rows]");
      const here = rows && document.getElementById(rows.id);
      if (!here) continue;
      const sent = new Map([...rows.children].map((row) => [row.id, row]));
      held = [...sent.keys()].filter((id) => !document.getElementById(id)).length;
      rows.replaceChildren(...[...here.children].map((row) => sent.get(row.id) ?? row.cloneNode(true)));
    }
    const html = [...parsed.querySelectorAll("template")].map((one) => one.outerHTML.replace(/^<template/, "<hx-partial").replace(/template>$/, "hx-partial>"));
    if (held > 0) message.data = html.join("\n");
    return held;
  }

  function onMessage(event) {
    if (event.detail.cancelled || !scrolled()) return;
    const { message } = event.detail;
    if (message.data.includes("data-live-rows")) announce(keepPlaces(message));
    else if (document.querySelector("[data-live-lines]") && message.data.includes("logline")) {
      announce(waiting + message.data.split('class="logline').length - 1);
    }
  }

  function afterMessage() {
    const lines = document.querySelector("[data-live-lines]");
    if (!lines) return;
    if (lines.children.length) document.getElementById("no-lines")?.remove();
    while (lines.children.length > MAX_LINES) lines.lastElementChild.remove();
  }

  function showFresh() {
    announce(0);
    window.scrollTo({ top: 0 });
    if (document.querySelector("[data-live-rows]")) fleetRefresh();
  }

  document.addEventListener("DOMContentLoaded", () => {
    if (!fresh()) return;
    document.addEventListener("htmx:sse:before:message", onMessage);
    document.addEventListener("htmx:sse:after:message", afterMessage);
    fresh().addEventListener("click", showFresh);
    window.addEventListener("scroll", () => {
      if (!scrolled() && waiting) showFresh();
    });
  });
})();
