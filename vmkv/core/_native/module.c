/* The module definition: a table of contents.  Each entry is documented in the file it comes from,
 * and for callers in _core.pyi. */
#include "module.h"

#include "executor.h"
#include "host.h"
#include "launch.h"
#include "references.h"
#include "tensor.h"
#include "tokens.h"

int vmkv_convert_u64(PyObject *object, void *result)
{
    PyObject *index = PyNumber_Index(object);
    if (index == NULL)
        return 0;
    unsigned long long value = PyLong_AsUnsignedLongLong(index);
    Py_DECREF(index);
    if (value == (unsigned long long)-1 && PyErr_Occurred())
        return 0; /* OverflowError, for negative integers too */
    *(uint64_t *)result = value;
    return 1;
}

void vmkv_free_instance(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc tp_free = (freefunc)PyType_GetSlot(type, Py_tp_free);
    tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"count_references", vmkv_count_references, METH_VARARGS, vmkv_count_references_doc},
    {"execute", vmkv_execute, METH_VARARGS, vmkv_execute_doc},
    {"host_functions", vmkv_host_functions, METH_NOARGS, vmkv_host_functions_doc},
    {"host_reserve", vmkv_host_reserve, METH_VARARGS, vmkv_host_reserve_doc},
    {"host_restoring", vmkv_host_restoring, METH_VARARGS, vmkv_host_restoring_doc},
    {"host_free", vmkv_host_free, METH_VARARGS, vmkv_host_free_doc},
    {"launch", (PyCFunction)(void (*)(void))vmkv_launch, METH_FASTCALL, vmkv_launch_doc},
    {"pack_token_ids", (PyCFunction)(void (*)(void))vmkv_pack_token_ids, METH_FASTCALL,
     vmkv_pack_token_ids_doc},
    {"transfer", vmkv_transfer, METH_VARARGS, vmkv_transfer_doc},
    {"view_capsule", vmkv_view_capsule, METH_VARARGS, vmkv_view_capsule_doc},
    {NULL, NULL, 0, NULL},
};

/* Makes a class and adds it; the caller keeps the reference that it returns. */
static PyObject *add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type != NULL && PyModule_AddType(module, (PyTypeObject *)type) < 0)
        Py_CLEAR(type);
    return type;
}

static int module_exec(PyObject *module)
{
    vmkv_module_state *state = PyModule_GetState(module);
    state->view_counter_type = add_type(module, &vmkv_view_counter_spec);
    if (state->view_counter_type == NULL)
        return -1;
    state->references_type = add_type(module, &vmkv_references_spec);
    if (state->references_type == NULL)
        return -1;
    PyObject *free_list_type = add_type(module, &vmkv_free_list_spec);
    Py_XDECREF(free_list_type);
    return free_list_type == NULL ? -1 : 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    vmkv_module_state *state = PyModule_GetState(module);
    Py_VISIT(state->view_counter_type);
    Py_VISIT(state->references_type);
    return 0;
}

static int module_clear(PyObject *module)
{
    vmkv_module_state *state = PyModule_GetState(module);
    Py_CLEAR(state->view_counter_type);
    Py_CLEAR(state->references_type);
    return 0;
}

static void module_free(void *module) { module_clear(module); }

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* all shared state here is atomic */
#endif
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "vmkv.core._native._core",
    .m_doc = "The native core of vmkv: free list and references, plan executor, host mappings, "
             "tensor views, tokens as bytes.",
    .m_size = sizeof(vmkv_module_state),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
