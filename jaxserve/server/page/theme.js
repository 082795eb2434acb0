// Runs before the page is drawn, so that a chosen theme shows from the first frame.
document.documentElement.dataset.theme = localStorage.getItem("jaxserve.theme") ?? "auto";
