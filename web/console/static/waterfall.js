// The lanes of a request: what a span or a mark says is shown above them, for pointer, finger and keyboard alike.
(() => {
  const shown = (element) => element?.closest?.("[data-detail]");

  function show(part) {
    document.querySelector(".waterfall .chosen")?.classList.remove("chosen");
    part.classList.add("chosen");
    document.getElementById("span-detail").textContent = part.dataset.detail;
  }

  function move(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const here = shown(event.target);
    if (!step || !here) return;
    const parts = [...document.querySelectorAll(".waterfall [data-detail]")];
    const next = parts[parts.indexOf(here) + step];
    event.preventDefault();
    next?.focus();
  }

  const on = (name, react) => document.addEventListener(name, react);
  for (const name of ["pointerover", "click", "focusin"]) {
    on(name, (event) => {
      const part = shown(event.target);
      if (part) show(part);
    });
  }
  on("keydown", move);
})();
