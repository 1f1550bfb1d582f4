// The message about a wrong password, which is shown after a failed login: /login?wrong.

document.getElementById("wrong").hidden = !new URLSearchParams(location.search).has("wrong");
