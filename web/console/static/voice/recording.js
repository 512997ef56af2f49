// The conversation as two tracks on one clock, saved as stereo WAV: the user's microphone, and the audio that was played.

const RATE_HZ = 24000;
const MAX_BYTES = 200_000_000;
const JOIN_MS = 60; // microphone blocks with smaller gaps are joined
const HEADER_BYTES = 44;

export class Recording {
  constructor() {
    this.clear();
  }

  clear() {
    this.blocks = [];
    this.runs = [];
    this.pieces = new Map();
    this.bytes = 0;
  }

  get empty() {
    return this.blocks.length === 0 && this.runs.length === 0;
  }

  /** @param {ArrayBuffer} pcm @param {number} rateHz @param {number} at time of its last sample */
  addMicrophoneBlock(pcm, rateHz, at) {
    const samples = new Int16Array(pcm.slice(0));
    this.blocks.push({ samples, rateHz, at: at - (1000 * samples.length) / rateHz });
    this.addBytes(samples.byteLength);
  }

  /** Drops the beginning of a conversation that is too long. */
  addBytes(bytes) {
    this.bytes += bytes;
    while (this.bytes > MAX_BYTES && this.blocks.length > 0) this.bytes -= this.blocks.shift().samples.byteLength;
    if (this.bytes > MAX_BYTES) this.dropAnswer(this.runs[0].answer);
  }

  dropAnswer(answer) {
    this.runs = this.runs.filter((run) => run.answer !== answer);
    for (const piece of this.pieces.get(answer) ?? []) this.bytes -= piece.byteLength;
    this.pieces.delete(answer);
  }

  /** @param {Int16Array} pcm the answer's next samples, played or not */
  addAnswerAudio(answer, pcm) {
    if (!this.pieces.has(answer)) this.pieces.set(answer, []);
    this.pieces.get(answer).push(pcm);
    this.addBytes(pcm.byteLength);
  }

  /** The answer is audible from sample `from` on, since time `at`. */
  startAnswerRun(answer, from, at) {
    this.runs.push({ answer, from, to: from, at });
  }

  endAnswerRun(answer, to) {
    const run = this.runs.findLast((known) => known.answer === answer);
    if (run) run.to = to;
  }

  /** @returns {Promise<Blob>} user left, model right, 24 kHz; begins with the first audio of either */
  async wav() {
    const stretches = joinBlocks(this.blocks);
    const runs = this.runs.map((run) => ({ ...run, to: Math.max(run.to, isLast(run, this.runs) ? run.answer.played : run.to) }));
    const start = Math.min(...stretches.map(({ at }) => at), ...runs.map(({ at }) => at));
    const ends = [
      ...stretches.map(({ at, samples, rateHz }) => at + (1000 * samples.length) / rateHz),
      ...runs.map(({ at, from, to, answer }) => at + (1000 * (to - from)) / answer.rateHz),
    ];
    const length = Math.max(1, Math.ceil(((Math.max(...ends) - start) * RATE_HZ) / 1000));
    const left = await mix(stretches, start, length);
    const right = new Int16Array(length);
    for (const run of runs) this.place(right, run, Math.round(((run.at - start) * RATE_HZ) / 1000));
    return encodeWav(left, right);
  }

  place(track, { answer, from, to }, at) {
    const whole = concatenate(this.pieces.get(answer) ?? [], answer.received);
    track.set(whole.subarray(from, Math.min(to, from + track.length - at)), at);
  }
}

/** Encode the turns as JSON. Units: `at_ms` from the first turn. @param {object[]} turns @returns {Blob} */
export function encodeTranscript(turns, model, session) {
  const start = turns[0]?.at ?? 0;
  const entries = turns.map((turn) => ({
    role: turn.role,
    at_ms: Math.round(turn.at - start),
    text: turn.text,
    ...FACTS[turn.role](turn),
  }));
  const whole = { model, session, saved_at: new Date().toISOString(), turns: entries };
  return new Blob([JSON.stringify(whole, null, 2)], { type: "application/json" });
}

const FACTS = {
  user: ({ kind }) => ({ kind }),
  tool: ({ name, arguments: given }) => ({ function: name, arguments: given }),
  assistant: answerFacts,
};

function answerFacts(answer) {
  return {
    heard: answer.text.slice(0, answer.heardChars),
    interrupted: answer.cut,
    played_ms: answer.playedMs,
    underruns: answer.underruns,
    request_id: answer.requestId,
    error: answer.failure || null,
    latency: answer.latency,
  };
}

function isLast(run, runs) {
  return runs.findLast(({ answer }) => answer === run.answer).at === run.at;
}

function joinBlocks(blocks) {
  const stretches = [];
  for (const block of blocks) {
    const last = stretches.at(-1);
    const end = last ? last.at + (1000 * last.length) / last.rateHz : 0;
    if (last && last.rateHz === block.rateHz && Math.abs(block.at - end) < JOIN_MS) {
      last.parts.push(block.samples);
      last.length += block.samples.length;
    } else {
      stretches.push({ at: block.at, rateHz: block.rateHz, parts: [block.samples], length: block.samples.length });
    }
  }
  return stretches.map(({ at, rateHz, parts, length }) => ({ at, rateHz, samples: concatenate(parts, length) }));
}

function concatenate(parts, length) {
  const whole = new Int16Array(length);
  let filled = 0;
  for (const part of parts) {
    whole.set(part, filled);
    filled += part.length;
  }
  return whole;
}

/** Resample the microphone to the recording's rate with the browser's resampler. */
async function mix(stretches, start, length) {
  const context = new OfflineAudioContext(1, length, RATE_HZ);
  for (const { at, rateHz, samples } of stretches) {
    const buffer = context.createBuffer(1, samples.length, rateHz);
    buffer.copyToChannel(Float32Array.from(samples, (sample) => sample / 32768), 0);
    const source = new AudioBufferSourceNode(context, { buffer });
    source.connect(context.destination);
    source.start(Math.max(0, (at - start) / 1000));
  }
  const rendered = await context.startRendering();
  return Int16Array.from(rendered.getChannelData(0), (sample) => Math.max(-32768, Math.min(32767, Math.round(sample * 32768))));
}

function encodeWav(left, right) {
  const bytes = 4 * left.length;
  const view = new DataView(new ArrayBuffer(HEADER_BYTES + bytes));
  const writeText = (at, text) => [...text].forEach((letter, n) => view.setUint8(at + n, letter.charCodeAt(0)));
  for (const [at, text] of [[0, "RIFF"], [8, "WAVEfmt "], [36, "data"]]) writeText(at, text);
  for (const [at, value] of [[4, 36 + bytes], [16, 16], [24, RATE_HZ], [28, 4 * RATE_HZ], [40, bytes]]) view.setUint32(at, value, true);
  for (const [at, value] of [[20, 1], [22, 2], [32, 4], [34, 16]]) view.setUint16(at, value, true);
  for (let n = 0; n < left.length; n += 1) {
    view.setInt16(HEADER_BYTES + 4 * n, left[n], true);
    view.setInt16(HEADER_BYTES + 4 * n + 2, right[n], true);
  }
  return new Blob([view.buffer], { type: "audio/wav" });
}
