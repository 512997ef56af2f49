// The user's settings, stored in the browser, and the fields of a session that they ask for.

const KEY = "fleet-voice";
const DEFAULT_RATE_HZ = 24000;
export const VAD_FIELDS = ["silence_duration_ms", "threshold", "prefix_padding_ms", "idle_timeout_ms"];
/** `voice` is null before a choice, and `vad` has the fields that were changed. `turns`: what ends a turn. */
const DEFAULTS = { voice: null, turns: "semantic_vad", eagerness: "auto", vad: {}, instructions: "", tools: "", input: "", output: "" };

export class Settings {
  constructor() {
    Object.assign(this, DEFAULTS);
    try {
      const stored = JSON.parse(localStorage.getItem(KEY) ?? "{}");
      for (const name of Object.keys(DEFAULTS)) this[name] = stored[name] ?? DEFAULTS[name];
      parseTools(this.tools);
    } catch {
      Object.assign(this, DEFAULTS); // storage is blocked or holds something else
    }
  }

  get pushToTalk() {
    return this.turns === "push";
  }

  save() {
    try {
      localStorage.setItem(KEY, JSON.stringify(Object.fromEntries(Object.keys(DEFAULTS).map((name) => [name, this[name]]))));
    } catch {
      // storage is blocked: the settings hold for this page only
    }
  }

  /** The value of `turn_detection`; null if the page ends turns. */
  get detection() {
    if (this.turns === "server_vad") return { type: "server_vad", ...this.vad };
    return this.turns === "semantic_vad" ? { type: "semantic_vad", eagerness: this.eagerness } : null;
  }

  /**
   * Return the `session` of a session.update. Without `hears` the model takes no audio, and refuses its settings.
   * @param {{model: string, hears: boolean, rateHz: number}} page `rateHz`: the microphone's, 0 before it is open
   */
  session({ model, hears, rateHz }) {
    const input = {
      format: { type: "audio/pcm", rate: rateHz || DEFAULT_RATE_HZ },
      transcription: { model },
      turn_detection: this.detection,
    };
    return {
      type: "realtime",
      output_modalities: [this.voice ? "audio" : "text"],
      instructions: this.instructions,
      tools: parseTools(this.tools),
      audio: { ...(hears ? { input } : {}), ...(this.voice ? { output: { voice: this.voice } } : {}) },
    };
  }
}

/** @param {string} text @returns {object[]} Raises: SyntaxError that says what is wrong. */
export function parseTools(text) {
  const tools = text.trim() ? JSON.parse(text) : [];
  if (!Array.isArray(tools)) throw new SyntaxError("an array of functions is expected: begin with [ and end with ]");
  return tools;
}
