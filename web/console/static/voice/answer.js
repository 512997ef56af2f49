// One answer of the model: its text, its sound as it came, and how much of it was heard. Knows no page and no socket.

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
    this.wireSerial = 0;
    this.text = "";
    /** What the session's history holds of it, once the server has cut it; null until then. */
    this.kept = null;
    this.received = 0;
    this.played = 0;
    this.underruns = 0;
    this.toldUnderruns = 0;
    this.audioDone = false;
    this.done = false;
    this.cut = false;
    this.failure = "";
    this.notes = [];
    this.askedAt = null;
    this.firstSoundAt = null;
    this.audibleAt = null;
    /** The place of its first voiced sample, once the server has sent that; null until then. */
    this.voiced = null;
    this.timing = null;
    this.latency = null;
  }

  get audible() {
    return this.received > 0;
  }

  /** Whether sound of it is still to be heard, or may still come. */
  get live() {
    return !this.cut && !this.failure && (!this.done || this.played < this.received);
  }

  /** The length of the silence that is played before its first voiced sample; null while that is not known. */
  get silenceMs() {
    return this.voiced === null ? null : (1000 * this.voiced) / this.rateHz;
  }

  get playedMs() {
    return Math.floor((1000 * this.played) / this.rateHz);
  }

  /**
   * The samples of a frame that are new. What was there before a reconnect is not repeated, and what is missing becomes silence, so
   * that positions stay those of the server.
   * @param {number} offset of the frame's first sample in the answer @param {Int16Array} pcm
   */
  accept(offset, pcm) {
    this.firstSoundAt ??= performance.now();
    const fresh = offset > this.received ? this.padded(offset - this.received, pcm) : pcm.subarray(this.received - offset);
    this.received += fresh.length;
    return fresh;
  }

  padded(missing, pcm) {
    const silence = Math.min(missing, MAX_GAP_S * this.rateHz);
    const whole = new Int16Array(silence + pcm.length);
    whole.set(pcm, silence);
    return whole;
  }

  /** How many characters of `text` belong to the sound that was played: in proportion, since text runs ahead of sound. */
  get heardChars() {
    if (this.kept !== null) return Math.min(this.kept.length, this.text.length);
    if (!this.audible) return this.done || this.cut ? (this.cut ? 0 : this.text.length) : 0;
    if (this.played >= this.received && this.audioDone) return this.text.length;
    const whole = this.audioDone ? this.received / this.rateHz : Math.max(this.received / this.rateHz, this.text.length / CHARS_PER_S);
    const chars = Math.floor((this.text.length * this.played) / (this.rateHz * whole));
    return wordEnd(this.text, Math.min(chars, this.text.length));
  }
}

/** Never beyond `chars`, and not inside a word. */
function wordEnd(text, chars) {
  if (chars >= text.length || /\s/.test(text[chars])) return chars;
  const start = text.lastIndexOf(" ", chars);
  return Math.max(0, start);
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
    /** "hearing" while the voice goes on, "waiting" for its transcript, else "done". */
    this.state = kind === "speech" ? "hearing" : "done";
    /** When the last voiced sample was spoken, or the message sent. */
    this.endedAt = kind === "text" ? this.at : null;
    this.lengthMs = 0;
  }
}
