// Who asks: the token is kept in this tab alone.

import { at } from "./dom.js";

const KEY = "kvpage.token";

/** The headers of a request. */
export function asked() {
  const token = sessionStorage.getItem(KEY);
  at("leave").hidden = token === null;
  return token === null ? {} : { Authorization: `Bearer ${token}` };
}

let asking = null;

/** Ask for a token, once however many requests were refused; resolves when there is another. */
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
