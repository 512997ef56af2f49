// Scripts of every page: theme, state of the live stream, pause, results of buttons, keyboard shortcuts.
(() => {
  const $ = (id) => document.getElementById(id);
  const THEMES = ["system", "light", "dark"];
  const THEME_ICONS = { system: "◐", light: "☀", dark: "☾" };
    const TOAST_MS = 6000;

  // Theme

  const theme = () => document.documentElement.dataset.theme ?? "system";

  function showTheme() {
    const label = `Theme: ${theme()}`;
    const button = $("theme");
    button.setAttribute("aria-label", label);
    button.title = label;
    button.firstElementChild.textContent = THEME_ICONS[theme()];
  }

  function nextTheme() {
    const chosen = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
    if (chosen === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    try {
      localStorage.setItem("fleet-theme", chosen);
    } catch {
      // storage is blocked: the theme holds for this page only
    }
    showTheme();
  }

  // Live stream

  let paused = false;
  const RETRY_MS = 700;

  // htmx reconnects a stream that was connected once; one whose first attempt failed is retried here.
  function retryStream(element) {
    const address = element.getAttribute?.("hx-sse:connect");
    if (!address) return;
    setLink("disconnected, retrying", "bad");
    setTimeout(() => {
      if (element.isConnected && !element._htmx?.sse) htmx.ajax("GET", address, { source: element });
    }, RETRY_MS);
  }

  // After the end of the login, a reload leads through the login page back here.
  function onStreamRefused(status) {
    if (status === 401) location.reload();
    else setLink("disconnected, retrying", "bad");
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
    button.textContent = paused ? "Resume" : "Pause";
    setLink("live", "ok");
    if (!paused) window.fleetRefresh();
  }

  // Replace the content by the current page.
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

  function showResult(button, response, text) {
    let body = {};
    try {
      body = JSON.parse(text);
    } catch {
      // not JSON of this API: show the status
    }
    if (response.status >= 400) return toast(body.error?.message ?? `The gateway returned HTTP status ${response.status}`, "bad");
    const address = button.dataset.goto && body.id ? button.dataset.goto + encodeURIComponent(body.id) : "";
    toast(button.dataset.done, "good", address);
    if (button.dataset.body) window.fleetRefresh();
  }

  // Build the JSON body of a form: `data-json` with the fields that are not empty as `arguments`.
  function encodeForm(form) {
    const used = [...form.elements].filter((field) => field.name && field.value !== "");
    const pairs = used.map((field) => [field.name, field.type === "number" ? Number(field.value) : field.value]);
    return JSON.stringify({ ...JSON.parse(form.dataset.json), arguments: Object.fromEntries(pairs) });
  }

  // Keys: "/" focuses the search, the arrows open the neighbouring page

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

  // Copies the text of the element with the id in data-copy; without an id, the link to this page.
  async function copy(button) {
    const source = $(button.dataset.copy);
    const link = location.origin + location.pathname;
    try {
      await navigator.clipboard.writeText(source ? source.textContent : link);
      toast("Copied", "good");
    } catch {
      if (!source) {
        toast(link, "good");
        return;
      }
      // there is no clipboard without a secure origin: select the text for copying by hand
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

  // Morphs keep opened details and a player that plays

  const isPlaying = (element) => [...element.querySelectorAll("audio")].some((player) => !player.paused);

  function onPlayerEnd({ target }) {
    if (target.matches("#player")) window.fleetRefresh();
  }

  htmx.registerExtension("fleet", {
    htmx_before_morph_attr: (element, detail) => !(element instanceof HTMLDetailsElement && detail.attrName === "open"),
    // audio that plays stays, even if the fleet has deleted it
    htmx_before_morph_node: (element) => !(element.matches?.("#audio") && isPlaying(element)),
    // do not insert the error page of a gateway or proxy
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
      const body = element.matches("form[data-json]") ? encodeForm(element) : element.dataset.body;
      if (!body) return;
      ctx.request.headers["content-type"] = "application/json";
      ctx.request.body = body;
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
      if (sourceElement?.dataset?.done !== undefined) showResult(sourceElement, response, text);
    });
    document.addEventListener("htmx:error", (event) => {
      // the event's target is the document if an update has removed the button meanwhile
      const source = event.detail.ctx?.sourceElement ?? event.target;
      if (!source._htmx?.sse) retryStream(source);
      if (source.dataset?.done !== undefined) toast("The gateway did not answer; the command may not have been received.", "bad");
    });
  });
})();
