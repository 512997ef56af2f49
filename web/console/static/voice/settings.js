// The user's settings, stored in the browser.

const KEY = "fleet-voice";
const DEFAULTS = { voice: null, pushToTalk: false, input: "", output: "" };

/** @returns {{voice: string|null, pushToTalk: boolean, input: string, output: string, save(): void}} `voice` is null before a choice */
export function readSettings() {
  const settings = { ...DEFAULTS, save };
  try {
    Object.assign(settings, JSON.parse(localStorage.getItem(KEY) ?? "{}"));
  } catch {
    // storage is blocked or holds something else: use the defaults
  }
  return settings;
}

function save() {
  const { voice, pushToTalk, input, output } = this;
  try {
    localStorage.setItem(KEY, JSON.stringify({ voice, pushToTalk, input, output }));
  } catch {
    // storage is blocked: the settings hold for this page only
  }
}
