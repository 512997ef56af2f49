// Plays the samples of one answer after another as they come, and tells what was really heard. Knows no socket and no page.
//
// An answer whose sound comes in time is played sample by sample as it was sent. Samples are faded only where sound must stop
// or begin in mid-answer: when it is cut off, and around an underrun. None is left out or played twice.

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

/** One answer's sound. `serial` grows from answer to answer. Units: `played` counts samples. */
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
    this.leaving = false;
    this.barred = 0; // serials up to this one are cut off: what still comes of them is late
    this.prebuffer = FIRST_PREBUFFER_S * sampleRate;
    this.clean = 0;
    this.squares = 0;
    this.sinceReport = 0;
    this.port.onmessage = ({ data }) => this.receive(data);
  }

  receive(message) {
    if (message.kind === "flush") return this.flush(message.serial);
    if (message.serial <= this.barred) return;
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
    this.barred = Math.max(this.barred, serial);
    if (this.playing) this.leaving = true;
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

  /** Start the first answer that has enough to play; one that has ended without more is done. Returns whether to look again. */
  begin() {
    const stream = this.streams[0];
    if (!stream) return false;
    if (stream.ended && stream.ring.length === 0) {
      this.finish(stream);
      return true;
    }
    if (stream.ring.length === 0 || (!stream.ended && stream.ring.length < this.prebuffer)) return false;
    this.playing = true;
    this.rising = stream.played > 0;
    this.tell("started", stream, currentTime);
    return false;
  }

  render(stream, out) {
    const { ring } = stream;
    // So much is kept back that there is always a whole quantum to fade out over.
    const dry = !stream.ended && ring.length < 2 * QUANTUM;
    const count = Math.min(out.length, ring.length);
    ring.read(out, count);
    if (this.rising) ramp(out, count, true);
    if (dry || this.leaving) ramp(out, count, false);
    this.rising = false;
    this.count(stream, out, count);
    if (this.leaving) this.drop();
    else if (dry) this.pause(stream);
    else if (stream.ended && ring.length === 0) this.finish(stream);
    else if (this.sinceReport >= REPORT_S * sampleRate) this.tell("report", stream, currentTime);
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
    this.tell("dry", stream, this.end);
  }

  finish(stream) {
    this.playing = false;
    this.streams.shift();
    this.tell("ended", stream, this.end ?? currentTime);
  }

  /** Everything up to the barred serial goes; an answer that began after it stays. */
  drop() {
    const cut = this.streams.filter((stream) => stream.serial <= this.barred);
    this.streams = this.streams.filter((stream) => stream.serial > this.barred);
    this.playing = false;
    this.leaving = false;
    for (const stream of cut) this.tell("flushed", stream, this.end ?? currentTime);
    if (cut.length === 0) this.port.postMessage({ kind: "flushed", serial: 0 });
  }

  tell(kind, stream, time) {
    const rms = this.sinceReport ? Math.sqrt(this.squares / this.sinceReport) : 0;
    this.sinceReport = 0;
    this.squares = 0;
    const { serial, played, underruns, ring } = stream;
    const { playing, prebuffer } = this;
    this.port.postMessage({ kind, serial, played, underruns, buffered: ring.length, playing, prebuffer, rms, time });
  }
}

function ramp(out, count, rising) {
  for (let n = 0; n < count; n += 1) out[n] *= (rising ? n + 1 : count - n - 1) / count;
}

registerProcessor("fleet-player", PlayerProcessor);
