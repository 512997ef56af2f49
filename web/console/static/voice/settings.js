// What the visitor chose, kept in this browser. Knows no page.

const KEY = "fleet-voice";
const DEFAULTS = { voice: null, walkie: false, input: "", output: "" };

/** @returns {{voice: string|null, walkie: boolean, input: string, output: string, save(): void}} `voice` null: never chosen */
export function readSettings() {
  const settings = { ...DEFAULTS, save };
  try {
    Object.assign(settings, JSON.parse(localStorage.getItem(KEY) ?? "{}"));
  } catch {
    // A browser that keeps nothing, or something else under this name: the defaults will do.
  }
  return settings;
}

function save() {
  const { voice, walkie, input, output } = this;
  try {
    localStorage.setItem(KEY, JSON.stringify({ voice, walkie, input, output }));
  } catch {
    // Kept for this page only.
  }
}
