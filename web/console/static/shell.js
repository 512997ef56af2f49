// What every page does in the browser: theme switch, the state of the live connection, answers of buttons, keys, pause.
(() => {
  const $ = (id) => document.getElementById(id);
  const THEMES = ["system", "light", "dark"];
  const THEME_SIGNS = { system: "◐", light: "☀", dark: "☾" };
  const THEME_WORDS = { system: "as the system has it", light: "light", dark: "dark" };
  const TOAST_MS = 6000;

  // Theme

  const theme = () => document.documentElement.dataset.theme ?? "system";

  function showTheme() {
    const words = `Theme: ${THEME_WORDS[theme()]}`;
    const button = $("theme");
    button.setAttribute("aria-label", words);
    button.title = words;
    button.firstElementChild.textContent = THEME_SIGNS[theme()];
  }

  function nextTheme() {
    const chosen = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
    if (chosen === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    try {
      localStorage.setItem("fleet-theme", chosen);
    } catch {
      // Kept for this page only.
    }
    showTheme();
  }

  // Live connection

  let paused = false;
  const RETRY_MS = 1000;

  // A stream that connected once reconnects by itself; one whose first attempt failed is asked for here until it connects.
  function retryStream(element) {
    const address = element.getAttribute?.("hx-sse:connect");
    if (!address) return;
    setLink("gateway away, trying again", "bad");
    setTimeout(() => {
      if (element.isConnected && !element._htmx?.sse) htmx.ajax("GET", address, { source: element });
    }, RETRY_MS);
  }

  // The login has ended: loading the page leads to the login page, and from there back.
  function onStreamRefused(status) {
    if (status === 401) location.reload();
    else setLink("gateway away, trying again", "bad");
  }

  function setLink(text, kind) {
    const link = $("link");
    if (!link || !$("live")) return;
    link.textContent = paused ? "paused" : text;
    link.className = `link ${paused ? "" : kind}`;
  }

  function setPaused(now) {
    paused = now;
    const button = $("pause");
    button.setAttribute("aria-pressed", String(paused));
    button.textContent = paused ? "Go on" : "Pause";
    setLink("live", "ok");
    if (!paused) window.fleetRefresh();
  }

  // The page as it is now, put into the place of what is shown.
  window.fleetRefresh = () =>
    htmx.ajax("GET", location.href, { source: "#main", target: "#page", select: "#page", swap: "outerMorph" });

  // Buttons that call the API

  function toast(text, kind, address = "") {
    const note = document.createElement("p");
    note.className = `toast ${kind}`;
    note.textContent = text;
    if (address) {
      const link = document.createElement("a");
      link.href = address;
      link.textContent = "Open it";
      note.append(". ", link);
    }
    $("toasts").append(note);
    setTimeout(() => note.remove(), TOAST_MS);
  }

  function answer(button, response, text) {
    let body = {};
    try {
      body = JSON.parse(text);
    } catch {
      // Not our shape: the status has to do.
    }
    if (response.status >= 400) return toast(body.error?.message ?? `The gateway answered ${response.status}`, "bad");
    const address = button.dataset.goto && body.id ? button.dataset.goto + encodeURIComponent(body.id) : "";
    toast(button.dataset.done, "good", address);
  }

  // A form for the API: the body that `data-json` begins, with the fields as its arguments; an empty field is left out.
  function jsonOf(form) {
    const given = [...form.elements].filter((field) => field.name && field.value !== "");
    const pairs = given.map((field) => [field.name, field.type === "number" ? Number(field.value) : field.value]);
    return JSON.stringify({ ...JSON.parse(form.dataset.json), arguments: Object.fromEntries(pairs) });
  }

  // Keys: "/" searches, the arrows go to the neighbour.

  function onKey(event) {
    const typing = event.target.closest?.("input, textarea, select, audio, [contenteditable]");
    if (event.altKey || event.ctrlKey || event.metaKey || typing) return;
    if (event.key === "/") {
      const search = $("search");
      if (!search) return;
      event.preventDefault();
      search.focus();
      search.select();
    } else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      if (event.target.closest?.("[data-own-arrows]")) return;
      document.querySelector(`a[rel="${event.key === "ArrowLeft" ? "prev" : "next"}"]`)?.click();
    }
  }

  async function copy(button) {
    const source = $(button.dataset.copy);
    try {
      await navigator.clipboard.writeText(source.textContent);
      toast("Copied", "good");
    } catch {
      // Without a secure origin there is no clipboard: the text is selected, for the visitor's own copy.
      getSelection().selectAllChildren(source);
      toast("Press Ctrl+C to copy", "good");
    }
  }

  function onClick(event) {
    const copied = event.target.closest("[data-copy]");
    if (copied) copy(copied);
    else if (event.target.closest("#theme")) nextTheme();
    else if (event.target.closest("#pause")) setPaused(!paused);
  }

  // What the visitor has opened or scrolled to stays: a morph must not close it, new rows must not push it away.

  const isPlaying = (sound) => [...sound.querySelectorAll("audio")].some((player) => !player.paused);

  function onPlayerEnd({ target }) {
    if (target.matches("#player")) window.fleetRefresh();
  }

  htmx.registerExtension("fleet", {
    htmx_before_morph_attr: (element, detail) => !(element instanceof HTMLDetailsElement && detail.attrName === "open"),
    // What is listened to stays, though the fleet no longer keeps it.
    htmx_before_morph_node: (element) => !(element.matches?.("#sound") && isPlaying(element)),
    // The error page of a gateway or proxy is no part of this page.
    htmx_before_response: (element, { ctx }) => {
      if (ctx.response.raw.ok || !element.hasAttribute("hx-sse:connect")) return;
      retryStream(element);
      onStreamRefused(ctx.response.raw.status);
      return false;
    },
    htmx_config_request: (_element, { ctx }) => {
      ctx.request.headers["x-csrf-token"] = document.body.dataset.csrf;
    },
    htmx_before_request: (element, { ctx }) => {
      if (!element.matches("form[data-json]")) return;
      ctx.request.headers["content-type"] = "application/json";
      ctx.request.body = jsonOf(element);
    },
  });

  document.addEventListener("DOMContentLoaded", () => {
    showTheme();
    document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
    document.addEventListener("keydown", onKey);
    document.addEventListener("click", onClick);
    for (const end of ["pause", "ended", "error"]) document.addEventListener(end, onPlayerEnd, true);
    document.addEventListener("htmx:sse:after:connection", () => setLink("live", "ok"));
    document.addEventListener("htmx:sse:error", (event) => onStreamRefused(event.detail.status));
    document.addEventListener("htmx:sse:before:message", (event) => {
      if (paused) event.detail.cancelled = true;
    });
    document.addEventListener("htmx:after:request", (event) => {
      const { sourceElement, response, text } = event.detail.ctx;
      if (sourceElement?.dataset?.done !== undefined) answer(sourceElement, response, text);
    });
    document.addEventListener("htmx:error", (event) => {
      if (!event.target._htmx?.sse) retryStream(event.target);
      if (event.target.dataset?.done !== undefined) toast("The gateway did not answer. Nothing is known to have changed.", "bad");
    });
  });
})();
