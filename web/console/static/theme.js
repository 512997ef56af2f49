// The chosen theme, before the first paint. "system" leaves the choice to the browser.
(() => {
  let chosen = "system";
  try {
    chosen = localStorage.getItem("fleet-theme") ?? "system";
  } catch {
    // A browser that keeps nothing shows its own theme.
  }
  if (chosen !== "system") document.documentElement.dataset.theme = chosen;
})();
