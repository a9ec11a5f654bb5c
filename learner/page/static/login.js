// The form that takes a token, where the learner has one.
import { $ } from "./dom.js";

/** @param {string} wrong what is said of another token @param {() => void} done */
export function listenForLogin(wrong, done) {
  $("login").addEventListener("submit", async (event) => {
    event.preventDefault();
    const answer = await fetch("/page/login", { method: "POST", body: JSON.stringify({ token: $("token").value }) })
      .catch(() => null);
    $("login-error").textContent = answer?.ok ? "" : answer?.status === 401 ? wrong : "The learner does not answer.";
    if (answer?.ok) {
      $("token").value = "";
      done();
    }
  });
}
