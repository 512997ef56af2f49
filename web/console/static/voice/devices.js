// The pickers of microphone and loudspeaker.

const PICKERS = [
  { kind: "audioinput", id: "input-device", field: "input-field" },
  { kind: "audiooutput", id: "output-device", field: "output-field" },
];

/** Shows each picker once there is a choice: browsers name devices only to a page that may use the microphone. */
export class Devices {
  /** @param {{input: string, output: string}} chosen @param {(kind: "input"|"output", deviceId: string) => void} onChoice */
  constructor(chosen, onChoice) {
    this.chosen = chosen;
    for (const { kind, id } of PICKERS) {
      const name = kind === "audioinput" ? "input" : "output";
      document.getElementById(id)?.addEventListener("change", ({ target }) => onChoice(name, target.value));
    }
    navigator.mediaDevices?.addEventListener?.("devicechange", () => this.refresh());
  }

  async refresh() {
    if (!navigator.mediaDevices?.enumerateDevices) return;
    const devices = await navigator.mediaDevices.enumerateDevices();
    for (const { kind, id, field } of PICKERS) {
      const named = devices.filter((device) => device.kind === kind && device.deviceId && device.label);
      const usable = kind === "audioinput" || "setSinkId" in AudioContext.prototype;
      document.getElementById(field).hidden = !usable || named.length === 0;
      this.fill(document.getElementById(id), named, kind === "audioinput" ? this.chosen.input : this.chosen.output);
    }
  }

  fill(select, devices, chosen) {
    const options = devices.filter(({ deviceId }) => deviceId !== "default").map(({ deviceId, label }) => new Option(label, deviceId));
    select.replaceChildren(new Option("System default", ""), ...options);
    select.value = chosen;
    if (select.selectedIndex < 0) select.value = "";
  }
}
