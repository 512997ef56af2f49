// Plays the samples of one answer after another as they arrive, and reports what was played.
//
// An answer whose audio arrives in time is played sample by sample as it was sent. Samples are faded only where audio stops or
// begins in mid-answer: at an interruption, and around an underrun. None is left out or played twice.

const QUANTUM = 128;
const REPORT_S = 0.05;
const FIRST_PREBUFFER_S = 0.1;
const MAX_PREBUFFER_S = 0.3;
const GROWTH_S = 0.02;
const DECAY_AFTER_S = 60;
const RING_S = 4;

/** A queue of samples in one block of memory that doubles when it is too small. */
class Ring {
  constructor(capacity) {
    this.samples = new Float32Array(capacity);
    this.head = 0;
    this.length = 0;
  }

  push(samples) {
    if (this.length + samples.length > this.samples.length) this.grow(this.length + samples.length);
    const tail = (this.head + this.length) % this.samples.length;
    const first = Math.min(samples.length, this.samples.length - tail);
    this.samples.set(samples.subarray(0, first), tail);
    this.samples.set(samples.subarray(first), 0);
    this.length += samples.length;
  }

  grow(needed) {
    let capacity = this.samples.length;
    while (capacity < needed) capacity *= 2;
    const larger = new Float32Array(capacity);
    const { length } = this;
    this.read(larger, length);
    Object.assign(this, { samples: larger, head: 0, length });
  }

  read(out, count) {
    const first = Math.min(count, this.samples.length - this.head);
    out.set(this.samples.subarray(this.head, this.head + first));
    out.set(this.samples.subarray(0, count - first), first);
    this.head = (this.head + count) % this.samples.length;
    this.length -= count;
  }
}

/** One answer's audio. `serial` grows from answer to answer. Units: `played` counts samples. */
class Stream {
  constructor(serial) {
    this.serial = serial;
    this.ring = new Ring(RING_S * sampleRate);
    this.ended = false;
    this.played = 0;
    this.underruns = 0;
  }
}

class PlayerProcessor extends AudioWorkletProcessor {
  constructor() {
    super();
    this.streams = [];
    this.playing = false;
    this.fadingOut = false;
    this.flushedUpTo = 0; // audio of serials up to this one arrives too late
    this.prebuffer = FIRST_PREBUFFER_S * sampleRate;
    this.clean = 0;
    this.squares = 0;
    this.sinceReport = 0;
    this.port.onmessage = ({ data }) => this.receive(data);
  }

  receive(message) {
    if (message.kind === "flush") return this.flush(message.serial);
    if (message.serial <= this.flushedUpTo) return;
    const stream = this.stream(message.serial);
    if (message.kind === "samples") stream.ring.push(message.samples);
    else stream.ended = true;
  }

  stream(serial) {
    let stream = this.streams.find((known) => known.serial === serial);
    if (!stream) {
      stream = new Stream(serial);
      this.streams.push(stream);
    }
    return stream;
  }

  flush(serial) {
    this.flushedUpTo = Math.max(this.flushedUpTo, serial);
    if (this.playing) this.fadingOut = true;
    else this.drop();
  }

  process(_inputs, outputs) {
    const channels = outputs[0];
    const out = channels[0];
    while (!this.playing && this.begin());
    if (this.playing) this.render(this.streams[0], out);
    for (let n = 1; n < channels.length; n += 1) channels[n].set(out);
    return true;
  }

  /** Start the first answer that has enough to play; finish one that has ended without more. Returns true to look at the next. */
  begin() {
    const stream = this.streams[0];
    if (!stream) return false;
    if (stream.ended && stream.ring.length === 0) {
      this.finish(stream);
      return true;
    }
    if (stream.ring.length === 0 || (!stream.ended && stream.ring.length < this.prebuffer)) return false;
    this.playing = true;
    this.fadingIn = stream.played > 0;
    this.report("started", stream, currentTime);
    return false;
  }

  render(stream, out) {
    const { ring } = stream;
    // a reserve, so that there is always a whole quantum to fade out over
    const dry = !stream.ended && ring.length < 2 * QUANTUM;
    const count = Math.min(out.length, ring.length);
    ring.read(out, count);
    if (this.fadingIn) ramp(out, count, true);
    if (dry || this.fadingOut) ramp(out, count, false);
    this.fadingIn = false;
    this.count(stream, out, count);
    if (this.fadingOut) this.drop();
    else if (dry) this.pause(stream);
    else if (stream.ended && ring.length === 0) this.finish(stream);
    else if (this.sinceReport >= REPORT_S * sampleRate) this.report("report", stream, currentTime);
  }

  count(stream, out, count) {
    for (let n = 0; n < count; n += 1) this.squares += out[n] * out[n];
    stream.played += count;
    this.end = currentTime + count / sampleRate;
    this.sinceReport += count;
    this.clean += count;
    if (this.clean < DECAY_AFTER_S * sampleRate) return;
    this.clean = 0;
    this.prebuffer = Math.max(this.prebuffer - GROWTH_S * sampleRate, FIRST_PREBUFFER_S * sampleRate);
  }

  pause(stream) {
    this.playing = false;
    this.clean = 0;
    stream.underruns += 1;
    this.prebuffer = Math.min(this.prebuffer + GROWTH_S * sampleRate, MAX_PREBUFFER_S * sampleRate);
    this.report("dry", stream, this.end);
  }

  finish(stream) {
    this.playing = false;
    this.streams.shift();
    this.report("ended", stream, this.end ?? currentTime);
  }

  /** Drop every answer up to the flushed serial; one that began after it stays. */
  drop() {
    const cut = this.streams.filter((stream) => stream.serial <= this.flushedUpTo);
    this.streams = this.streams.filter((stream) => stream.serial > this.flushedUpTo);
    this.playing = false;
    this.fadingOut = false;
    for (const stream of cut) this.report("flushed", stream, this.end ?? currentTime);
    if (cut.length === 0) this.port.postMessage({ kind: "flushed", serial: 0 });
  }

  report(kind, stream, time) {
    const rms = this.sinceReport ? Math.sqrt(this.squares / this.sinceReport) : 0;
    this.sinceReport = 0;
    this.squares = 0;
    const { serial, played, underruns, ring } = stream;
    const { playing, prebuffer } = this;
    this.port.postMessage({ kind, serial, played, underruns, buffered: ring.length, playing, prebuffer, rms, time });
  }
}

function ramp(out, count, up) {
  for (let n = 0; n < count; n += 1) out[n] *= (up ? n + 1 : count - n - 1) / count;
}

registerProcessor("fleet-player", PlayerProcessor);
