// The access token of the page, which is stored for this tab only.

import { at } from "./dom.js";

const KEY = "kvpage.token";

/** Return the headers of a request with the token, and show the button that deletes it. */
export function asked() {
  const token = sessionStorage.getItem(KEY);
  at("leave").hidden = token === null;
  return token === null ? {} : { Authorization: `Bearer ${token}` };
}

let asking = null;

/** Show the dialog for a token, once for all refused requests. Resolve when it is closed. */
export function denied() {
  asking ??= new Promise((resolve) => {
    const error = at("login-error");
    error.hidden = sessionStorage.getItem(KEY) === null;
    error.textContent = "That token is not known here.";
    at("login").showModal();
    at("login").addEventListener("close", () => {
      const token = at("token").value.trim();
      if (token) sessionStorage.setItem(KEY, token);
      at("token").value = "";
      asking = null;
      resolve();
    }, { once: true });
  });
  return asking;
}

at("leave").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  location.reload();
});
