"use strict";
const notice = document.getElementById("notice");
for (const type of ["htmx:sendError", "htmx:responseError"]) {
  document.addEventListener(type, () => (notice.hidden = false));
}
document.addEventListener("htmx:afterOnLoad", ({ detail }) => (notice.hidden = detail.xhr.status < 400));
