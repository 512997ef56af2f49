// Applies the chosen theme before the first paint. "system" leaves the choice to the browser.
(() => {
  let chosen = "system";
  try {
    chosen = localStorage.getItem("fleet-theme") ?? "system";
  } catch {
    // storage is blocked: use the system's theme
  }
  if (chosen !== "system") document.documentElement.dataset.theme = chosen;
})();
