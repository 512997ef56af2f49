// From the end of a question to the first voiced sample of its answer: one number, and where it went. Pure; knows no page.

/**
 * What the server says of its part, in order.
 * @typedef {{voice_to_voice_ms: number|null, parts: {name: string, ms: number}[]}} Timing
 * @typedef {{totalMs: number, parts: {name: string, ms: number}[]}} Latency
 */

/**
 * The server's durations and this page's own clock, never the one's time against the other's.
 *
 * `endedAt` is when the last voiced sample was spoken (or the message sent), `firstSoundAt` when the first sound arrived and
 * `audibleAt` when it was heard, all on the page's clock; what the server does not account for between the first two was the network.
 * The server's parts end with the first voiced sample, of which `silenceMs` lie behind the first sound.
 * @param {{endedAt: number|null, firstSoundAt: number, audibleAt: number, silenceMs: number, timing: Timing}} turn
 * @returns {Latency} the parts add up to the whole
 */
export function latencyOf({ endedAt, firstSoundAt, audibleAt, silenceMs = 0, timing }) {
  const parts = timing.parts.map(({ name, ms }) => ({ name, ms: Math.max(0, ms) }));
  const server = parts.reduce((sum, part) => sum + part.ms, 0);
  if (endedAt !== null) parts.push({ name: "network", ms: Math.max(0, firstSoundAt - endedAt - (server - silenceMs)) });
  parts.push({ name: "buffer", ms: Math.max(0, audibleAt - firstSoundAt) });
  return { totalMs: parts.reduce((sum, part) => sum + part.ms, 0), parts };
}

/** @param {number[]} values @returns {number|null} */
export function median(values) {
  if (values.length === 0) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** When each millisecond of the sound that was sent was spoken: the server names places in it, this page needs times. */
export class SentSound {
  constructor() {
    this.ms = 0;
    this.marks = [];
  }

  /** @param {number} ms its length @param {number} at when its last sample was spoken */
  add(ms, at) {
    this.ms += ms;
    this.marks.push({ ms: this.ms, at });
    if (this.marks.length > 6000) this.marks.splice(0, 3000);
  }

  /** @param {number} ms from the session's first sample @returns {number|null} null where it is not known */
  when(ms) {
    const mark = this.marks.find((known) => known.ms >= ms);
    return mark ? mark.at - (mark.ms - ms) : null;
  }
}
