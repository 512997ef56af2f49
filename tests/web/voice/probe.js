// Forwards its input, with each block's position in the context and the wall clock at its first sample.

const QUANTA = 2;

class Probe extends AudioWorkletProcessor {
  constructor() {
    super();
    this.start();
  }

  start() {
    this.block = null;
    this.filled = 0;
  }

  process(inputs, outputs) {
    const samples = inputs[0][0];
    if (!samples) return true;
    outputs[0].forEach((out) => out.set(samples));
    this.block ??= { frame: currentFrame, wall: Date.now(), pcm: new Int16Array(QUANTA * samples.length) };
    for (const sample of samples) {
      this.block.pcm[this.filled] = Math.max(-32768, Math.min(32767, Math.round(sample * 32768)));
      this.filled += 1;
    }
    if (this.filled < this.block.pcm.length) return true;
    this.port.postMessage(this.block, [this.block.pcm.buffer]);
    this.start();
    return true;
  }
}

registerProcessor("probe", Probe);
