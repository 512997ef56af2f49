// The latency from the end of a question to the first voiced sample of its answer, and its parts. Pure functions.

/**
 * `parts` of a Timing are the server's, in order.
 * @typedef {{voice_to_voice_ms: number|null, parts: {name: string, ms: number}[]}} Timing
 * @typedef {{totalMs: number, parts: {name: string, ms: number}[]}} Latency
 */

/**
 * Combine the server's durations with times of the page's clock; times of the two clocks are never compared.
 *
 * `endedAt` is the time of the last voiced sample (or of sending the message), `firstAudioAt` when the first audio arrived and
 * `audibleAt` when it was played. Time between the first two that the server does not account for is the network's. The server's
 * parts end with the first voiced sample, `silenceMs` after the first audio.
 * @param {{endedAt: number|null, firstAudioAt: number, audibleAt: number, silenceMs: number, timing: Timing}} turn
 * @returns {Latency} whose parts add up to the total
 */
export function computeLatency({ endedAt, firstAudioAt, audibleAt, silenceMs = 0, timing }) {
  const parts = timing.parts.map(({ name, ms }) => ({ name, ms: Math.max(0, ms) }));
  const server = parts.reduce((sum, part) => sum + part.ms, 0);
  if (endedAt !== null) parts.push({ name: "network", ms: Math.max(0, firstAudioAt - endedAt - (server - silenceMs)) });
  parts.push({ name: "buffer", ms: Math.max(0, audibleAt - firstAudioAt) });
  return { totalMs: parts.reduce((sum, part) => sum + part.ms, 0), parts };
}

/** @param {number[]} values @returns {number|null} */
export function median(values) {
  if (values.length === 0) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** Maps positions in the audio that was sent, as the server gives them, to times of the page's clock. */
export class SentAudio {
  constructor() {
    this.ms = 0;
    this.blocks = [];
  }

  /** @param {number} ms length of a block @param {number} at time of its last sample */
  add(ms, at) {
    this.ms += ms;
    this.blocks.push({ ms: this.ms, at });
    if (this.blocks.length > 6000) this.blocks.splice(0, 3000);
  }

  /** @param {number} ms from the session's first sample @returns {number|null} null where the time is not known */
  timeAt(ms) {
    const block = this.blocks.find((known) => known.ms >= ms);
    return block ? block.at - (block.ms - ms) : null;
  }
}
