// Controls the playback worklet: receives an answer's PCM16, reports what was played.

import { AudioNotAllowed } from "./reasons.js";

/**
 * A report of the worklet. Units: samples; `time` is that of the audio context, in seconds.
 * @typedef {{kind: "started"|"report"|"dry"|"ended"|"flushed", serial: number, played: number, underruns: number,
 *   buffered: number, playing: boolean, prebuffer: number, rms: number, time: number}} Playback
 */

/** Dispatches each `Playback` as an event of its kind, and as "playback". `at` of the event is its time on the page's clock. */
export class Player extends EventTarget {
  /** @param {string} workletUrl @param {number} rateHz */
  constructor(workletUrl, rateHz) {
    super();
    this.workletUrl = workletUrl;
    this.rateHz = rateHz;
    this.playing = false;
    this.rms = 0;
    this.buffered = 0;
    this.underruns = 0;
    this.totalPlayed = 0;
    this.waiting = [];
    /** @type {Map<number, {played: number, underruns: number}>} */
    this.seen = new Map();
  }

  /** Start audio. Call it from a click or key press: browsers start audio only then. Raises: AudioNotAllowed. */
  async open() {
    this.opening ??= this.load();
    await this.opening;
    if (this.context.state !== "running") await this.context.resume();
  }

  async load() {
    if (!window.isSecureContext || !window.AudioWorkletNode) throw new AudioNotAllowed();
    this.context = new AudioContext({ sampleRate: this.rateHz, latencyHint: "interactive" });
    await this.context.audioWorklet.addModule(this.workletUrl);
    this.node = new AudioWorkletNode(this.context, "fleet-player", { numberOfInputs: 0, outputChannelCount: [1] });
    this.node.port.onmessage = ({ data }) => this.onPlayback(data);
    this.node.connect(this.context.destination);
    if (this.sinkId) await this.setSink(this.sinkId);
    for (const message of this.waiting.splice(0)) this.post(message);
  }

  /** @param {string} deviceId empty: the system's own choice */
  async setSink(deviceId) {
    this.sinkId = deviceId;
    if (this.context?.setSinkId) await this.context.setSinkId(deviceId);
  }

  /** @param {number} serial @param {Int16Array} pcm */
  push(serial, pcm) {
    const samples = new Float32Array(pcm.length);
    for (let n = 0; n < pcm.length; n += 1) samples[n] = pcm[n] / 32768;
    this.post({ kind: "samples", serial, samples }, [samples.buffer]);
  }

  /** @param {number} serial */
  end(serial) {
    this.post({ kind: "end", serial });
  }

  /**
   * Silence answers up to `serial` within milliseconds; audio of them that arrives later is dropped.
   * @param {number} serial @returns {Promise<void>} resolved when the last of them is silent and its count reported
   */
  async flush(serial) {
    this.waiting = this.waiting.filter((message) => message.serial > serial);
    if (!this.node) return;
    const flushed = new Promise((resolve) => this.addEventListener("flushed", resolve, { once: true }));
    this.post({ kind: "flush", serial });
    if (this.context.state === "running") await flushed;
  }

  /** Convert the context's `time` into the time (performance.now) at which its audio left the loudspeaker. */
  pageTime(time) {
    const { contextTime, performanceTime } = this.context.getOutputTimestamp?.() ?? {};
    if (performanceTime) return performanceTime + 1000 * (time - contextTime);
    return performance.now() + 1000 * (time - this.context.currentTime + (this.context.outputLatency ?? 0));
  }

  /** @param {Playback} playback */
  onPlayback(playback) {
    if (playback.serial > 0) this.count(playback);
    const at = playback.time === undefined ? performance.now() : this.pageTime(playback.time);
    for (const kind of [playback.kind, "playback"]) this.dispatchEvent(new CustomEvent(kind, { detail: { ...playback, at } }));
  }

  count(playback) {
    const before = this.seen.get(playback.serial) ?? { played: 0, underruns: 0 };
    this.totalPlayed += playback.played - before.played;
    this.underruns += playback.underruns - before.underruns;
    this.seen.set(playback.serial, { played: playback.played, underruns: playback.underruns });
    if (playback.kind === "ended" || playback.kind === "flushed") this.seen.delete(playback.serial);
    this.playing = playback.playing;
    this.rms = playback.playing ? playback.rms : 0;
    this.buffered = playback.kind === "flushed" ? 0 : playback.buffered;
  }

  post(message, transfer = []) {
    if (this.node) this.node.port.postMessage(message, transfer);
    else this.waiting.push(message);
  }
}
