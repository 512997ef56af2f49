// Plays mono samples as they come: waits for a short prebuffer, counts underruns, and reports what was really played.

const REPORT_SAMPLES = 1200;
const FADE_SAMPLES = 96;
const FIRST_PREBUFFER_S = 0.1;
const MAX_PREBUFFER_S = 0.3;
const GROWTH_S = 0.02;

class PlayerProcessor extends AudioWorkletProcessor {
  constructor() {
    super();
    this.played = 0;
    this.underruns = 0;
    this.sinceReport = 0;
    this.squares = 0;
    this.prebuffer = FIRST_PREBUFFER_S * sampleRate;
    this.flush();
    this.port.onmessage = ({ data }) => this.receive(data);
  }

  receive(message) {
    if (message.kind === "samples") {
      this.queue.push(message.samples);
      this.buffered += message.samples.length;
      this.ended = false;
    } else if (message.kind === "end") {
      this.ended = true;
    } else {
      this.flush();
      this.report();
    }
  }

  flush() {
    this.queue = [];
    this.head = 0;
    this.buffered = 0;
    this.playing = false;
    this.ended = false;
    this.fadedIn = 0;
  }

  process(_inputs, outputs) {
    const channels = outputs[0];
    const out = channels[0];
    if (!this.playing && this.buffered > 0 && (this.ended || this.buffered >= this.prebuffer)) {
      this.playing = true;
      this.fadedIn = 0;
    }
    if (this.playing) this.fill(out);
    for (let n = 1; n < channels.length; n += 1) channels[n].set(out);
    return true;
  }

  fill(out) {
    const count = Math.min(out.length, this.buffered);
    for (let n = 0; n < count; n += 1) {
      const gain = this.fadedIn < FADE_SAMPLES ? (this.fadedIn += 1) / FADE_SAMPLES : 1;
      const sample = this.queue[0][this.head] * gain;
      out[n] = sample;
      this.squares += sample * sample;
      this.head += 1;
      if (this.head === this.queue[0].length) {
        this.queue.shift();
        this.head = 0;
      }
    }
    this.buffered -= count;
    this.played += count;
    this.sinceReport += count;
    const empty = this.buffered === 0;
    if (empty) this.runDry(out, count);
    if (empty || this.sinceReport >= REPORT_SAMPLES) this.report();
  }

  runDry(out, count) {
    this.playing = false;
    if (this.ended) return;
    for (let n = 0; n < Math.min(count, FADE_SAMPLES); n += 1) out[count - 1 - n] *= n / FADE_SAMPLES;
    this.underruns += 1;
    this.prebuffer = Math.min(this.prebuffer + GROWTH_S * sampleRate, MAX_PREBUFFER_S * sampleRate);
  }

  report() {
    const rms = this.sinceReport ? Math.sqrt(this.squares / this.sinceReport) : 0;
    this.sinceReport = 0;
    this.squares = 0;
    const { played, underruns, playing, buffered } = this;
    this.port.postMessage({ played, underruns, playing, buffered, rms });
  }
}

registerProcessor("fleet-player", PlayerProcessor);
