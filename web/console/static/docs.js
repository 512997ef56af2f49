// The API page: Swagger UI over this gateway's OpenAPI document.
(() => {
  const { theme } = document.documentElement.dataset;
  const dark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.classList.toggle("dark-mode", dark);

  // A browser's login is a cookie: its changes are accepted only with the token of the page.
  function addToken(request) {
    const { csrf } = document.body.dataset;
    if (csrf && new URL(request.url, location.href).origin === location.origin) request.headers["x-csrf-token"] = csrf;
    return request;
  }

  SwaggerUIBundle({
    url: "/openapi.json",
    dom_id: "#swagger-ui",
    deepLinking: true,
    defaultModelsExpandDepth: 0,
    requestInterceptor: addToken,
    validatorUrl: null, // the default is another host
  });
})();
