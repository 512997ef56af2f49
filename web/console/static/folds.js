// Opens the folds that were left open, before they are painted, and remembers each change.
(() => {
  const KEY = "fleet-folds";
  let open = {};
  try {
    open = JSON.parse(localStorage.getItem(KEY)) ?? {};
  } catch {
    // storage is blocked or holds something else: every fold is closed
  }
  const restore = new MutationObserver((records) => {
    for (const { addedNodes } of records) for (const node of addedNodes) if (node.localName === "details" && open[node.id]) node.open = true;
  });
  restore.observe(document, { childList: true, subtree: true });
  document.addEventListener("DOMContentLoaded", () => restore.disconnect());
  // the event does not bubble
  const onToggle = ({ target }) => {
    if (!target.id.endsWith("-fold")) return;
    open[target.id] = target.open;
    try {
      localStorage.setItem(KEY, JSON.stringify(open));
    } catch {
      // storage is blocked: the choice holds for this page only
    }
  };
  document.addEventListener("toggle", onToggle, true);
})();
