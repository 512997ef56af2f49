// The page's end of the worklet: PCM16 in, and what was heard out.

export class Player extends EventTarget {
  constructor(rateHz, workletUrl) {
    super();
    this.rateHz = rateHz;
    this.workletUrl = workletUrl;
    this.played = 0;
    this.underruns = 0;
    this.playing = false;
    this.buffered = 0;
    this.rms = 0;
    this.peakRms = 0;
    this.node = null;
    this.waiting = [];
  }

  // Must be called from a click or a key press: browsers start sound only then.
  async open() {
    if (this.context) return this.context.resume();
    if (!window.isSecureContext || !window.AudioWorkletNode) {
      throw new Error(
        "This browser plays sound only on localhost or https. From another machine use ssh -L and open http://localhost.",
      );
    }
    this.context = new AudioContext({ sampleRate: this.rateHz, latencyHint: "interactive" });
    await this.context.audioWorklet.addModule(this.workletUrl);
    this.node = new AudioWorkletNode(this.context, "fleet-player", { numberOfInputs: 0, outputChannelCount: [1] });
    this.node.port.onmessage = ({ data }) => this.heard(data);
    this.node.connect(this.context.destination);
    for (const message of this.waiting.splice(0)) this.post(message);
    return this.context.resume();
  }

  heard(report) {
    Object.assign(this, report);
    this.peakRms = Math.max(this.peakRms, report.rms);
    this.dispatchEvent(new Event("heard"));
  }

  push(pcm16) {
    const view = new DataView(pcm16);
    const samples = new Float32Array(view.byteLength >> 1);
    for (let n = 0; n < samples.length; n += 1) samples[n] = view.getInt16(2 * n, true) / 32768;
    this.post({ kind: "samples", samples }, [samples.buffer]);
  }

  end() {
    this.post({ kind: "end" });
  }

  flush() {
    this.waiting = [];
    this.post({ kind: "flush" });
  }

  post(message, transfer = []) {
    if (this.node) this.node.port.postMessage(message, transfer);
    else this.waiting.push(message);
  }

  get playedS() {
    return this.played / this.rateHz;
  }
}
