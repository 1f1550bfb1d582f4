// Show the message about a wrong password after a failed login.

document.getElementById("wrong").hidden = !new URLSearchParams(location.search).has("wrong");
