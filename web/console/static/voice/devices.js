// The pickers of microphone and loudspeaker.

const PICKERS = [
  { name: "input", kind: "audioinput" },
  { name: "output", kind: "audiooutput" },
];

/** Shows each picker once there is a choice: browsers name devices only to a page that may use the microphone. */
export class Devices {
  /** @param {{input: string, output: string}} chosen @param {(kind: "input"|"output", deviceId: string) => void} onChoice */
  constructor(chosen, onChoice) {
    this.chosen = chosen;
    for (const { name } of PICKERS) {
      document.getElementById(`${name}-device`)?.addEventListener("change", ({ target }) => onChoice(name, target.value));
    }
    navigator.mediaDevices?.addEventListener?.("devicechange", () => this.refresh());
  }

  async refresh() {
    if (!navigator.mediaDevices?.enumerateDevices) return;
    const devices = await navigator.mediaDevices.enumerateDevices();
    for (const { name, kind } of PICKERS) {
      const named = devices.filter((device) => device.kind === kind && device.deviceId && device.label);
      const usable = kind === "audioinput" || "setSinkId" in AudioContext.prototype;
      document.getElementById(`${name}-field`).hidden = !usable || named.length === 0;
      this.fill(document.getElementById(`${name}-device`), named, this.chosen[name]);
    }
  }

  fill(select, devices, chosen) {
    const options = devices.filter(({ deviceId }) => deviceId !== "default").map(({ deviceId, label }) => new Option(label, deviceId));
    select.replaceChildren(new Option("System default", ""), ...options);
    select.value = chosen;
    if (select.selectedIndex < 0) select.value = "";
  }
}
