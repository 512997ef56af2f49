// The elements of the Voice page: turns, state, reasons and the latency headline.

import { median } from "./latency.js";
import { TurnView } from "./turn-view.js";

const NEAR_END_PX = 80;

export class PageView {
  /** @param {Map<string, number>} colours of the stages */
  constructor(colours) {
    this.colours = colours;
    this.turns = new Map();
    this.reasons = new Map();
    this.log = document.getElementById("conversation");
    this.scroller = document.getElementById("scroll");
    this.empty = document.getElementById("empty");
    this.state = "";
  }

  addTurn(turn) {
    this.empty.remove();
    const view = new TurnView(turn, this.colours, (call, output) => this.onResult(call, output));
    this.turns.set(turn, view);
    this.log.append(view.element);
    this.scroller.scrollTop = this.scroller.scrollHeight;
    if (turn.role === "user") this.onQuestion?.();
  }

  turnChanged(turn) {
    const near = this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight < NEAR_END_PX;
    const view = this.turns.get(turn);
    const hasNewLatency = turn.latency && view?.shownLatency !== turn.latency;
    view?.update();
    if (hasNewLatency) this.showHeadline();
    if (near) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  removeTurn(turn) {
    this.turns.get(turn)?.element.remove();
    this.turns.delete(turn);
    this.showHeadline();
    if (this.turns.size === 0) this.log.replaceChildren(this.empty);
  }

  /** Show the last answer's latency, the last spoken one's, and the median of all of these. */
  showHeadline() {
    const last = [...this.turns.keys()].findLast((turn) => turn.latency);
    if (last) document.getElementById("first-sound").textContent = `first sound ${Math.round(last.latency.totalMs)} ms`;
    const spoken = [...this.turns.keys()].filter((turn) => turn.latency && turn.spoken);
    const values = spoken.map(({ latency }) => latency.totalMs);
    const headline = document.getElementById("headline");
    headline.hidden = values.length === 0;
    if (values.length === 0) return;
    document.getElementById("last-ms").textContent = `${Math.round(values.at(-1))} ms`;
    document.getElementById("median-ms").textContent = values.length > 1 ? `· median ${Math.round(median(values))} ms of ${values.length}` : "";
  }

  /** The stream of the pipeline status names the request in its address, so that any gateway can continue it. */
  showRequest(requestId) {
    const sourceElement = document.getElementById("pipeline-stream");
    const next = sourceElement.cloneNode();
    next.setAttribute("hx-sse:connect", `/console/events?request=${encodeURIComponent(requestId)}`);
    htmx.swap({ sourceElement, target: sourceElement, text: next.outerHTML, swap: "outerHTML" });
  }

  showState({ state, label }) {
    const element = document.getElementById("state");
    if (element.textContent !== label) element.textContent = label;
    if (state === this.state) return;
    this.showLink(state);
    this.state = state;
    document.body.dataset.state = state;
    this.onState?.(state);
  }

  showLink(state) {
    const away = ["connecting", "reconnecting", "refused"].includes(state);
    const link = document.getElementById("link");
    link.textContent = away ? "disconnected, retrying" : "connected";
    if (["connecting", "ended"].includes(state)) link.textContent = state;
    link.className = `link ${away || state === "ended" ? "bad" : "ok"}`;
  }

  /** @param {object|null} reason null removes it @param {string} kind at most one of each is shown */
  showReason(reason, kind = "answer") {
    const shown = this.reasons.get(kind);
    if (reason && shown?.querySelector(".text").textContent === reason.text) return; // each block of audio may be refused alike
    shown?.remove();
    this.reasons.delete(kind);
    if (!reason) return;
    const element = document.getElementById("reason-template").content.firstElementChild.cloneNode(true);
    element.dataset.kind = kind;
    element.querySelector(".title").textContent = reason.title;
    element.querySelector(".text").textContent = reason.text;
    element.querySelector("code").textContent = reason.command ?? "";
    element.querySelector("code").hidden = !reason.command;
    element.querySelector(".push-to-talk-offer").hidden = kind !== "echo";
    element.querySelector(".dismiss").addEventListener("click", () => this.showReason(null, kind));
    this.reasons.set(kind, element);
    document.getElementById("reasons").append(element);
  }
}
