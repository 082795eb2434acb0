// Runs before the first frame, so that the chosen theme applies from the start.
let theme = "auto";
try {
  theme = localStorage.getItem("jaxserve.theme") ?? theme;
} catch {} // the browser may forbid storage
document.documentElement.dataset.theme = theme;
