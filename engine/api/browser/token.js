// The access token of the page, which is stored for this tab only.

import { at } from "./dom.js";

const KEY = "kvpage.token";

/** Return the headers of a request: the token, or none without a token. Show the button that deletes the token if there
 * is one. */
export function authHeaders() {
  const token = sessionStorage.getItem(KEY);
  at("leave").hidden = token === null;
  return token === null ? {} : { Authorization: `Bearer ${token}` };
}

let dialogClosed = null; // the promise of the open dialog

/** Show the dialog for a token, once for all refused requests. Resolve when it is closed. */
export function askForToken() {
  dialogClosed ??= new Promise((resolve) => {
    const error = at("login-error");
    error.hidden = sessionStorage.getItem(KEY) === null;
    error.textContent = "Unknown token.";
    at("login").showModal();
    at("login").addEventListener("close", () => {
      const token = at("token").value.trim();
      if (token) sessionStorage.setItem(KEY, token);
      at("token").value = "";
      dialogClosed = null;
      resolve();
    }, { once: true });
  });
  return dialogClosed;
}

at("leave").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  location.reload();
});
