// The lanes of a request: the description of a span or mark is shown above them, on pointer, touch and keyboard focus.
(() => {
  const findPart = (element) => element?.closest?.("[data-detail]");

  function show(part) {
    document.querySelector(".waterfall .chosen")?.classList.remove("chosen");
    part.classList.add("chosen");
    document.getElementById("span-detail").textContent = part.dataset.detail;
  }

  function move(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const current = findPart(event.target);
    if (!step || !current) return;
    const parts = [...document.querySelectorAll(".waterfall [data-detail]")];
    const next = parts[parts.indexOf(current) + step];
    event.preventDefault();
    next?.focus();
  }

  const on = (name, handler) => document.addEventListener(name, handler);
  for (const name of ["pointerover", "click", "focusin"]) {
    on(name, (event) => {
      const part = findPart(event.target);
      if (part) show(part);
    });
  }
  on("keydown", move);
})();
