// Says what was wrong with the last try.

document.getElementById("wrong").hidden = !new URLSearchParams(location.search).has("wrong");
