// Runs before the page is drawn, so that a chosen theme shows from the first frame.
let theme = "auto";
try {
  theme = localStorage.getItem("jaxserve.theme") ?? theme;
} catch {} // a browser may forbid storage
document.documentElement.dataset.theme = theme;
