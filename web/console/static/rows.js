// New rows do not move the page while the user has scrolled down: they are counted, and shown on request.
(() => {
  const MAX_LINES = 500;
  const SCROLLED_PX = 140;
  let numWithheld = 0;

  const fresh = () => document.getElementById("fresh");
  const scrolled = () => window.scrollY > SCROLLED_PX;

  function announce(count) {
    numWithheld = count;
    fresh().hidden = numWithheld === 0;
    fresh().textContent = `${numWithheld} new, show`;
  }

  // Reduce a message to the rows that the page has, in the page's order. Returns the number of new rows that are left out.
  function withholdNewRows(message) {
    const parsed = new DOMParser().parseFromString(message.data.replaceAll("hx-partial", "template"), "text/html");
    let numNew = 0;
    for (const template of parsed.querySelectorAll("template")) {
      const rows = template.content.querySelector("[data-live-rows]");
      const here = rows && document.getElementById(rows.id);
      if (!here) continue;
      const sent = new Map([...rows.children].map((row) => [row.id, row]));
      numNew = [...sent.keys()].filter((id) => !document.getElementById(id)).length;
      rows.replaceChildren(...[...here.children].map((row) => sent.get(row.id) ?? row.cloneNode(true)));
    }
    const html = [...parsed.querySelectorAll("template")].map((one) => one.outerHTML.replace(/^<template/, "<hx-partial").replace(/template>$/, "hx-partial>"));
    if (numNew > 0) message.data = html.join("\n");
    return numNew;
  }

  function onMessage(event) {
    if (event.detail.cancelled || !scrolled()) return;
    const { message } = event.detail;
    if (message.data.includes("data-live-rows")) announce(withholdNewRows(message));
    else if (document.querySelector("[data-live-lines]") && message.data.includes("logline")) {
      announce(numWithheld + message.data.split('class="logline').length - 1);
    }
  }

  function trimLines() {
    const lines = document.querySelector("[data-live-lines]");
    if (!lines) return;
    if (lines.children.length) document.getElementById("no-lines")?.remove();
    while (lines.children.length > MAX_LINES) lines.lastElementChild.remove();
  }

  function showNewRows() {
    announce(0);
    window.scrollTo({ top: 0 });
    if (document.querySelector("[data-live-rows]")) fleetRefresh();
  }

  document.addEventListener("DOMContentLoaded", () => {
    if (!fresh()) return;
    document.addEventListener("htmx:sse:before:message", onMessage);
    document.addEventListener("htmx:sse:after:message", trimLines);
    fresh().addEventListener("click", showNewRows);
    window.addEventListener("scroll", () => {
      if (!scrolled() && numWithheld) showNewRows();
    });
  });
})();
