// The kinds of turn: an answer of the model (text, received and played audio), its call of a function, and a question of the user.

const CHARS_PER_S = 15; // of ordinary speech: used until an answer's whole length is known
const MAX_GAP_S = 30;

export class Answer {
  /** @param {string} responseId @param {number} serial the player's number for it @param {number} rateHz */
  constructor(responseId, serial, rateHz) {
    this.role = "assistant";
    this.responseId = responseId;
    this.rateHz = rateHz;
    this.at = performance.now();
    this.itemId = null;
    this.requestId = null;
    this.serial = serial;
    /** The connection's number for its audio stream. */
    this.streamSerial = 0;
    this.text = "";
    /** Text that the session's history holds after an interruption; null before. */
    this.historyText = null;
    this.received = 0;
    this.played = 0;
    this.underruns = 0;
    this.reportedUnderruns = 0;
    this.audioDone = false;
    this.done = false;
    this.cut = false;
    this.failure = "";
    this.notes = [];
    this.firstAudioAt = null;
    this.audibleAt = null;
    /** Position of its first voiced sample; null until the server has sent it. */
    this.firstVoiced = null;
    /** Ends of its words whose audio has come, `[characters, samples]`; empty if the voice does not tell them. */
    this.wordEnds = [];
    this.timing = null;
    this.latency = null;
  }

  get audible() {
    return this.received > 0;
  }

  /** True while audio of it is still to be played or received. */
  get live() {
    return !this.cut && !this.failure && (!this.done || this.played < this.received);
  }

  /** Length of the silence before its first voiced sample; null while unknown. */
  get silenceMs() {
    return this.firstVoiced === null ? null : (1000 * this.firstVoiced) / this.rateHz;
  }

  get playedMs() {
    return Math.floor((1000 * this.played) / this.rateHz);
  }

  /**
   * Return the new samples of a frame. Samples repeated after a reconnect are dropped and a gap becomes silence, so that positions
   * stay those of the server.
   * @param {number} offset of the frame's first sample in the answer @param {Int16Array} pcm
   */
  acceptFrame(offset, pcm) {
    this.firstAudioAt ??= performance.now();
    const fresh = offset > this.received ? this.padGap(offset - this.received, pcm) : pcm.subarray(this.received - offset);
    this.received += fresh.length;
    return fresh;
  }

  padGap(missing, pcm) {
    const silence = Math.min(missing, MAX_GAP_S * this.rateHz);
    const whole = new Int16Array(silence + pcm.length);
    whole.set(pcm, silence);
    return whole;
  }

  /** @param {number[][]} ends of the next words; after a reconnect all of them are sent again */
  addWords(ends) {
    const known = this.wordEnds.at(-1)?.[0] ?? 0;
    this.wordEnds.push(...ends.filter(([chars]) => chars > known));
  }

  /**
   * Number of characters of `text` whose audio was played: exact where the voice tells when words end, else estimated in proportion,
   * since text arrives ahead of its audio.
   */
  get heardChars() {
    if (this.historyText !== null) return Math.min(this.historyText.length, this.text.length);
    if (!this.audible) return this.done && !this.cut ? this.text.length : 0;
    if (this.played >= this.received && this.audioDone) return this.text.length;
    if (this.wordEnds.length > 0) {
      const [chars] = this.wordEnds.findLast(([, end]) => end <= this.played) ?? [0];
      return Array.from(this.text).slice(0, chars).join("").length; // the server counts characters, JavaScript their halves
    }
    const whole = this.audioDone ? this.received / this.rateHz : Math.max(this.received / this.rateHz, this.text.length / CHARS_PER_S);
    const chars = Math.floor((this.text.length * this.played) / (this.rateHz * whole));
    return findWordEnd(this.text, Math.min(chars, this.text.length));
  }
}

/** Return the last position up to `chars` that is not inside a word. */
function findWordEnd(text, chars) {
  if (chars >= text.length || /\s/.test(text[chars])) return chars;
  const start = text.lastIndexOf(" ", chars);
  return Math.max(0, start);
}

/** A call of a function by the model, whose result the user types. */
export class FunctionCall {
  /** @param {{call_id: string, name: string, arguments: string}} event */
  constructor({ call_id, name, arguments: given }) {
    this.role = "tool";
    this.callId = call_id;
    this.name = name;
    this.arguments = given;
    this.at = performance.now();
    /** Time of sending the result, with which the next answer begins; null before. */
    this.endedAt = null;
    this.text = "";
  }

  /** The items by which a conversation holds the call and, once it is known, its result. */
  get items() {
    const { callId: call_id, name } = this;
    const call = { type: "function_call", call_id, name, arguments: this.arguments };
    return this.endedAt === null ? [call] : [call, this.result];
  }

  get result() {
    return { type: "function_call_output", call_id: this.callId, output: this.text };
  }
}

/** One question, spoken or typed. */
export class Question {
  /** @param {"speech"|"text"} kind @param {string} text */
  constructor(kind, text = "") {
    this.role = "user";
    this.kind = kind;
    this.text = text;
    this.at = performance.now();
    this.itemId = null;
    /** "hearing" while the user speaks, "waiting" for the transcript, else "done". */
    this.state = kind === "speech" ? "hearing" : "done";
    /** Time of the last voiced sample, or of sending the message. */
    this.endedAt = kind === "text" ? this.at : null;
    this.lengthMs = 0;
  }
}
