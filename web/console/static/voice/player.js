// The page's end of the playback worklet: PCM16 of an answer in, what was heard of it out. Knows no protocol.

import { NoSound } from "./reasons.js";

/**
 * What the worklet tells. Units: samples; `time` is that of the audio context, in seconds.
 * @typedef {{kind: "started"|"report"|"dry"|"ended"|"flushed", serial: number, played: number, underruns: number,
 *   buffered: number, playing: boolean, prebuffer: number, rms: number, time: number}} Heard
 */

/** Dispatches each `Heard` as an event of its kind, and "heard" for all. `at` of the event is when it was audible, on the page's clock. */
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

  /** Start sound. Must be called from a click or a key press: browsers start sound only then. Raises: NoSound. */
  async open() {
    this.opening ??= this.load();
    await this.opening;
    if (this.context.state !== "running") await this.context.resume();
  }

  async load() {
    if (!window.isSecureContext || !window.AudioWorkletNode) throw new NoSound();
    this.context = new AudioContext({ sampleRate: this.rateHz, latencyHint: "interactive" });
    await this.context.audioWorklet.addModule(this.workletUrl);
    this.node = new AudioWorkletNode(this.context, "fleet-player", { numberOfInputs: 0, outputChannelCount: [1] });
    this.node.port.onmessage = ({ data }) => this.onHeard(data);
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
   * Silence, within a few milliseconds; answers up to `serial` are never heard again.
   * @param {number} serial @returns {Promise<void>} when the last of them is quiet and its count has been told
   */
  async flush(serial) {
    this.waiting = this.waiting.filter((message) => message.serial > serial);
    if (!this.node) return;
    const quiet = new Promise((resolve) => this.addEventListener("flushed", resolve, { once: true }));
    this.post({ kind: "flush", serial });
    if (this.context.state === "running") await quiet;
  }

  /** When what the worklet rendered at `time` reached the ear, on the page's clock (performance.now). */
  pageTime(time) {
    const { contextTime, performanceTime } = this.context.getOutputTimestamp?.() ?? {};
    if (performanceTime) return performanceTime + 1000 * (time - contextTime);
    return performance.now() + 1000 * (time - this.context.currentTime + (this.context.outputLatency ?? 0));
  }

  /** @param {Heard} heard */
  onHeard(heard) {
    if (heard.serial > 0) this.count(heard);
    const at = heard.time === undefined ? performance.now() : this.pageTime(heard.time);
    for (const kind of [heard.kind, "heard"]) this.dispatchEvent(new CustomEvent(kind, { detail: { ...heard, at } }));
  }

  count(heard) {
    const before = this.seen.get(heard.serial) ?? { played: 0, underruns: 0 };
    this.totalPlayed += heard.played - before.played;
    this.underruns += heard.underruns - before.underruns;
    this.seen.set(heard.serial, { played: heard.played, underruns: heard.underruns });
    if (heard.kind === "ended" || heard.kind === "flushed") this.seen.delete(heard.serial);
    this.playing = heard.playing;
    this.rms = heard.playing ? heard.rms : 0;
    this.buffered = heard.kind === "flushed" ? 0 : heard.buffered;
  }

  post(message, transfer = []) {
    if (this.node) this.node.port.postMessage(message, transfer);
    else this.waiting.push(message);
  }
}
